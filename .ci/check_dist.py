#!/usr/bin/env python3
"""Says whether a wheel and an sdist hold what they should: `.ci/check_dist.py FOLDER [TAG]`."""

import email
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOT_SHIPPED = re.compile(r"\.github/|\.gitignore$|\.pre-commit-config\.yaml$")


def main(folder: str, tag: str | None = None) -> None:
    """Raises for whatever is missing, or is there and not committed."""
    (wheel,), (sdist,) = pathlib.Path(folder).glob("*.whl"), pathlib.Path(folder).glob("*.tar.gz")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT)
    tracked = {name for name in listed.decode().splitlines() if not NOT_SHIPPED.match(name)}

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    made = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    package = {name for name in tracked if name.startswith("tfscale/")}
    compare(wheel, names, package | {f"{info}/{name}" for name in made})

    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    names = {name for name in names if not name.startswith("tfscale.egg-info/")}
    compare(sdist, names, tracked | {"PKG-INFO", "setup.cfg"})

    version = metadata["Version"]
    if tag not in (None, f"v{version}"):
        raise SystemExit(f"The tag must be v{version}, as in tfscale/_version.py. Received: {tag}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    if tag and f"\n## [{version}] - " not in changes:
        raise SystemExit(f"CHANGELOG.md must have a heading of {version} with its date.")
    relative = re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.get_payload())
    if relative:
        raise SystemExit(f"The README in {wheel.name} must link to the home. Found: {relative}")
    print(f"{wheel.name} and {sdist.name} hold what they should")


def compare(archive: pathlib.Path, found: set[str], expected: set[str]) -> None:
    """Raises for the files that make the difference."""
    if found != expected:
        raise SystemExit(
            f"{archive.name} lacks {sorted(expected - found)} and has {sorted(found - expected)}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
