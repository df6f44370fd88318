"""One look at a list of gradients: no bad element is missed, no finite one is taken for bad."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import execute, slow_jit

import tfscale
from tfscale import gradients

FLOAT32_MAX = float(np.finfo("float32").max)

REAL = ["float16", "bfloat16", "float32", "float64"]
DTYPES = [*REAL, "complex64"]
BAD = [np.inf, -np.inf, np.nan]


@pytest.fixture(params=["eager", "graph", slow_jit])
def mode(request):
    return request.param


def checker(mode):
    return execute(mode, gradients.all_finite)


def slices(values, rows, height=6):
    values = tf.convert_to_tensor(values)
    shape = tf.constant([height, *values.shape[1:]], tf.int64)
    return tf.IndexedSlices(values, tf.constant(rows, tf.int64), shape)


def gradient(kind, dtype, values):
    """Six numbers as a gradient of this kind."""
    values = tf.cast(tf.constant(values, "complex64"), dtype) if dtype == "complex64" else values
    values = tf.cast(tf.reshape(values, (3, 2)), dtype)
    # Row 1 comes twice: what is written there last must not hide what was there first.
    return slices(values, [1, 1, 4]) if kind == "slices" else values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "slices"])
def test_a_bad_element_is_seen_wherever_it_is(mode, kind, dtype):
    check = checker(mode)
    clean = np.arange(6, dtype="float32")
    fine = gradient(kind, dtype, clean)
    assert bool(check([fine] * 3))
    for which in (0, 1, 2):
        for element in (0, 3, 5):
            for bad in BAD:
                broken = clean.copy()
                broken[element] = bad
                grads = [fine] * 3
                grads[which] = gradient(kind, dtype, broken)
                assert not bool(check(grads)), (which, element, bad)


def test_a_bad_imaginary_part_is_seen(mode):
    check = checker(mode)
    assert bool(check([tf.complex(tf.ones(3), tf.ones(3))]))
    assert not bool(check([tf.complex(tf.ones(3), tf.constant([0.0, 0.0, np.inf]))]))


def test_infinities_of_both_signs_do_not_cancel(mode):
    check = checker(mode)
    up, down = tf.constant([1.0, np.inf]), tf.constant([1.0, -np.inf])
    assert not bool(check([up, down]))
    assert not bool(check([slices([[np.inf], [-np.inf]], [1, 1]), slices([[1.0], [1.0]], [1, 2])]))


@pytest.mark.parametrize("count", [1, 2, 24])
def test_huge_but_finite_gradients_are_finite(mode, count):
    # Their sum and the sum of their squares are not.
    check = checker(mode)
    for value in (1e38, FLOAT32_MAX, -FLOAT32_MAX, 2e19):
        huge = [tf.fill([4], value) for _ in range(count)]
        assert bool(check(huge)), value
        assert not bool(check([*huge[1:], tf.constant([value, np.nan] * 2)])), value


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65504.0), ("float64", 1e200)])
def test_the_largest_numbers_of_a_dtype_are_finite(mode, dtype, value):
    check = checker(mode)
    huge = tf.fill([300], tf.constant(value, dtype))
    assert bool(check([huge, -huge, huge, huge]))


def test_one_list_may_hold_every_kind(mode):
    check = checker(mode)
    grads = [
        None,
        tf.ones([2, 3]),
        tf.ones([2, 3], tf.float16),
        tf.ones([2, 3], tf.bfloat16),
        tf.ones([2, 3], tf.float64),
        tf.complex(tf.ones([2, 3]), tf.ones([2, 3])),
        tf.constant(1.0),
        tf.zeros([0, 5]),
        slices([[1.0, 2.0], [3.0, 4.0]], [0, 0]),
        slices(np.zeros([0, 4], "float32"), []),
        None,
    ]
    assert bool(check(grads))
    for i, one in enumerate(grads):
        if one is None or not tf.size(gradients.values(one)):
            continue
        broken = list(grads)
        if isinstance(one, tf.IndexedSlices):
            broken[i] = slices(one.values * np.nan, [0, 0])
        else:
            broken[i] = one * tf.cast(np.nan, one.dtype)
        assert not bool(check(broken)), one


@pytest.mark.parametrize("grads", [[], [None], [None, None], [tf.zeros([0])]], ids=str)
def test_nothing_to_look_at_is_finite(mode, grads):
    assert bool(checker(mode)(grads))


LISTS = {
    "dense": lambda: [tf.ones([2, 3])],
    "half": lambda: [tf.ones([2, 3], tf.float16), tf.ones([4])],
    "more than a word has bits": lambda: [tf.ones([2]) for _ in range(33)],
    "empty at the end": lambda: [tf.ones([2, 3]), tf.zeros([0, 5]), None],
    "scalar": lambda: [tf.constant(1.0)],
    "scalar at the end": lambda: [tf.ones([2, 3]), tf.constant(1.0)],
    "complex": lambda: [tf.complex(tf.ones([2, 3]), tf.ones([2, 3]))],
    "slices": lambda: [slices([[1.0, 2.0], [3.0, 4.0]], [0, 0])],
    "no row": lambda: [tf.ones([2]), slices(np.zeros([0, 4], "float32"), [])],
    "empty": lambda: [tf.zeros([0])],
    "none": lambda: [None],
    "nothing": list,
}


@pytest.mark.parametrize("name", LISTS)
def test_the_mask_shows_which_gradient_is_not_finite(mode, name):
    def found(grads):
        check = gradients.check_finite(grads)
        return check.finite, check.nonfinite_mask()

    check, good = execute(mode, found), LISTS[name]()
    filled = [i for i, g in enumerate(good) if g is not None and tf.size(gradients.values(g))]
    for which in (None, *filled[:1], *filled[-1:]):
        grads, wanted = list(good), [i == which for i in range(len(good))]
        if which is not None and isinstance(good[which], tf.IndexedSlices):
            grads[which] = slices(good[which].values * np.nan, [0, 0])
        elif which is not None:
            grads[which] = good[which] * tf.cast(np.nan, good[which].dtype)
        finite, mask = check(grads)
        assert bool(finite) == (which is None)
        assert mask.numpy().tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_becomes_nan(mode, dtype):
    numbers = [1.0, np.inf, -np.inf, np.nan, 0.0, -2.0]
    marked = execute(mode, gradients.with_nan)(tf.constant(numbers, dtype))
    assert marked.dtype == dtype
    np.testing.assert_array_equal(
        np.isnan(marked.numpy().astype("complex64")), ~np.isfinite(numbers)
    )
    assert marked.numpy()[[0, 4, 5]].tolist() == [1.0, 0.0, -2.0]


@pytest.mark.parametrize("shape", [(None, 2), None], ids=str)
def test_gradients_of_unknown_shape_are_checked(shape):
    spec = tf.TensorSpec(shape, tf.float32)
    check = tf.function(lambda a, b: gradients.all_finite([a, b]), input_signature=[spec, spec])
    ones, bad = tf.ones([3, 2]), tf.constant([[1.0, np.inf]])
    assert bool(check(ones, tf.ones([5, 2])))
    assert not bool(check(ones, bad))
    assert not bool(check(bad, ones))


def test_slices_of_unknown_row_count_are_checked():
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64)])
    def check(values, rows):
        one = tf.IndexedSlices(values, rows, tf.constant([9, 2], tf.int64))
        return gradients.all_finite([one, tf.ones([2, 2])])

    assert bool(check(tf.ones([3, 2]), [1, 1, 2]))
    assert not bool(check(tf.constant([[np.nan, 1.0], [1.0, 1.0]]), [1, 1]))


# Unscaling.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "slices"])
def test_unscaling_divides_in_at_least_float32(mode, kind, dtype):
    # In float16, 2**-24 would become zero, and so would the scale become infinite.
    wide = {"float64": "float64", "complex64": "complex64"}.get(dtype, "float32")
    unscale = execute(mode, gradients.unscale)
    values = np.array([0.0, 1.0, -3.0, 2.0**-24, 100.0, -1.5], "float32")
    given = gradient(kind, dtype, values)
    got = unscale(given, tf.constant(2.0**20))
    assert got.dtype == wide
    assert isinstance(got, tf.IndexedSlices) == (kind == "slices")
    wanted = tf.cast(gradients.values(given), wide).numpy() / 2**20
    np.testing.assert_array_equal(gradients.values(got).numpy(), wanted)
    if kind == "slices":
        assert got.indices.numpy().tolist() == [1, 1, 4]
        assert got.dense_shape.numpy().tolist() == [6, 2]


def test_unscaling_leaves_none_and_empty_gradients(mode):
    unscale = execute(mode, gradients.unscale)
    assert unscale(None, tf.constant(2.0)) is None
    assert unscale(tf.zeros([0, 3], tf.float16), tf.constant(2.0)).shape == (0, 3)


def test_unscaling_keeps_what_is_not_finite(mode):
    unscale = execute(mode, gradients.unscale)
    got = unscale(tf.constant([np.inf, -np.inf, np.nan], tf.float16), tf.constant(2.0**15)).numpy()
    np.testing.assert_array_equal(got, [np.inf, -np.inf, np.nan])


def test_slices_without_a_dense_shape_are_unscaled(mode):
    unscale = execute(mode, gradients.unscale)
    got = unscale(tf.IndexedSlices(tf.ones([2, 1]), tf.constant([3, 3])), tf.constant(4.0))
    assert got.dense_shape is None
    assert got.values.numpy().tolist() == [[0.25], [0.25]]


# The fault that made users of embeddings lose their tables.


def test_a_repeated_row_does_not_hide_an_overflow(mode):
    table = keras.Variable(np.ones([6, 2], "float32"))
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 4.0)
    optimizer.build([table])

    def apply(values):
        optimizer.scale_loss(1.0)
        optimizer.apply_gradients([(slices(values, [2, 2, 2]), table)])

    step = execute(mode, apply, autograph=False)
    for bad_row in range(3):
        values = np.ones([3, 2], "float32")
        values[bad_row, 0] = np.inf
        step(tf.constant(values))
        assert table.numpy().tolist() == [[1.0, 1.0]] * 6
        assert int(optimizer.skipped_steps) == bad_row + 1
    step(tf.ones([3, 2]))
    assert table.numpy()[2].tolist() == [0.25, 0.25]
