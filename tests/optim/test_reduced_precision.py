"""Products in reduced precision against float64, entry by entry: within the promised bounds, and
not far below."""

import pytest
import torch

from brx.optim.reduced_precision import (
    _has_tf32,
    _split,
    add_product,
    factor_rounding,
    fp32_products,
    precision_on,
    product,
    round_to_tf32,
)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def matrices(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    # Sizes over six orders of magnitude, as gradients have.
    scales = 10.0 ** (6 * torch.rand(shape, generator=generator) - 3)
    return torch.randn(shape, generator=generator) * scales


@pytest.fixture
def capability(monkeypatch):
    """Sets the capability of all GPUs, whether or not there are any."""

    def set_to(major, minor):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, minor))

    _has_tf32.cache_clear()
    yield set_to
    _has_tf32.cache_clear()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("highest", torch.float32), ("tf32", torch.float64)]
)
def test_factors_that_stay_as_they_are_are_not_rounded(precision, dtype):
    assert factor_rounding(precision, dtype) == 0


def test_auto_is_fp32_on_a_cpu():
    assert precision_on(torch.device("cpu"), "auto") == "highest"


@pytest.mark.parametrize(
    ("version", "expected"), [((7, 5), "highest"), ((8, 0), "tf32"), ((9, 0), "tf32")]
)
def test_auto_is_tf32_where_a_gpu_has_it(version, expected, capability):
    capability(*version)
    assert precision_on(torch.device("cuda", 0), "auto") == expected


def test_auto_is_fp32_on_a_gpu_of_another_make(capability, monkeypatch):
    capability(9, 4)
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert precision_on(torch.device("cuda", 0), "auto") == "highest"


@pytest.mark.parametrize("asked", ["highest", "tf32", "bf16"])
def test_a_precision_that_is_named_holds_everywhere(asked, capability):
    capability(9, 0)
    assert precision_on(torch.device("cuda", 0), asked) == asked
    assert precision_on(torch.device("cpu"), asked) == asked


@pytest.mark.parametrize(
    ("precision", "bound"), [("highest", 128 * 2**-24), ("tf32", 2**-10), ("bf16", 3 * 2**-16)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_error_is_within_the_bound(precision, bound, device):
    left, right = (
        matrices(0, 3, 64, 128).to(device),
        matrices(1, 3, 128, 96).to(device),
    )  # a GPU has TF32 for these
    assert torch.equal(
        product(left.double(), right.double(), precision), left.double() @ right.double()
    )
    left = left.mT.contiguous().mT  # as bases are: column by column in memory
    error = (product(left, right, precision).double() - left.double() @ right.double()).abs()
    relative = error / (left.double().abs() @ right.double().abs())
    # Beside the rounding of the factors, the accumulation in fp32; a GPU may cut bits off instead
    # of rounding to TF32.
    assert (
        relative.max()
        < (1 if device == "cpu" else 2 if precision == "tf32" else 1.1) * bound + 128 * 2**-24
    )
    if precision != "highest":
        assert relative.max() > bound / 20


@pytest.mark.parametrize(("precision", "bound"), [("highest", 128 * 2**-24), ("tf32", 2**-10)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_added_product_is_within_the_bound(precision, bound, device):
    left = matrices(0, 3, 64, 128).to(device)
    total = left @ left.mT
    found = total.clone()
    add_product(found, left, left.mT, decay=0.75, weight=0.25, precision=precision)
    wide = left.double()
    error = (found.double() - (0.75 * total.double() + 0.25 * wide @ wide.mT)).abs()
    relative = error / (wide.abs() @ wide.abs().mT)
    # A GPU may cut bits off, which doubles the error.
    factor = 2 if device == "cuda" else 1
    assert relative.max() < factor * bound + 128 * 2**-24
    if precision == "tf32":
        assert relative.max() > bound / 20


def test_float64_products_are_added_exactly():
    left = matrices(0, 2, 8, 5).double()
    total = torch.ones(2, 8, 8, dtype=torch.float64)
    expected = 0.5 + 2 * left @ left.mT
    add_product(total, left, left.mT, decay=0.5, weight=2.0, precision="tf32")
    torch.testing.assert_close(total, expected, rtol=1e-14, atol=1e-14 * float(expected.max()))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dim", [-1, -2])
def test_split_parts_add_up_and_keep_the_order_in_memory(dim, by_columns):
    matrix = matrices(0, 2, 7, 5)
    if by_columns:
        matrix = matrix.mT.contiguous().mT
    joined = _split(matrix, dim, ("low", "high", "high"))
    low, high, again = joined.chunk(3, dim)
    assert torch.equal(high, matrix.to(torch.bfloat16))
    assert torch.equal(low, (matrix - high).to(torch.bfloat16))
    assert torch.equal(again, high)
    assert (joined.mT if by_columns else joined).is_contiguous()


def test_tf32_has_ten_bits_of_mantissa():
    numbers = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -(1 + 2**-12), 3.0e38, 0.0])
    expected = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1.0, 3.0e38, 0.0])
    torch.testing.assert_close(round_to_tf32(numbers), expected, rtol=2**-11, atol=0)
    assert round_to_tf32(numbers)[:5].tolist() == expected[:5].tolist()


def precisions():
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    )


@pytest.fixture
def programs_precision():
    """Puts the setting of the program back."""
    at_start = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(at_start)


@pytest.mark.usefixtures("programs_precision")
@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_programs_precision_returns_after_products(chosen, precision):
    torch.set_float32_matmul_precision(chosen)
    before = precisions()
    with fp32_products(precision):
        assert precisions() == (precision, precision)
    assert torch.get_float32_matmul_precision() == chosen
    assert precisions() == before


@pytest.mark.usefixtures("programs_precision")
@pytest.mark.parametrize("general", ["tf32", "ieee"])
def test_programs_general_precision_returns_after_products(general):
    # What follows the program's general setting goes on following it.
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    with torch.backends.flags(fp32_precision=general):
        with fp32_products("ieee"):
            pass
        assert precisions() == (general, general)


@pytest.mark.usefixtures("programs_precision")
def test_programs_precision_returns_after_steps_of_two_threads():
    """Steps of two optimizers: the first to begin is the first to end."""
    torch.set_float32_matmul_precision("high")
    before = precisions()
    first, second = fp32_products("ieee"), fp32_products("ieee")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert precisions() == ("ieee", "ieee")  # the second step goes on
    second.__exit__(None, None, None)
    assert precisions() == before


@pytest.mark.usefixtures("programs_precision")
def test_products_within_a_step_leave_the_steps_precision():
    torch.set_float32_matmul_precision("high")
    with fp32_products("ieee"):
        with fp32_products("tf32"):
            assert precisions() == ("tf32", "tf32")
        assert precisions() == ("ieee", "ieee")
