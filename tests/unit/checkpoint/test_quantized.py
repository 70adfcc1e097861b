import torch
from torch import nn

from gspo_mega.checkpoint.quantized import filled, is_fp8_parameter, keep_exact, plain_values


class EightBits(torch.Tensor):
    """Behaves as Transformer Engine's tensors do where it matters: slices are copies, `quantize_` writes rounded
    values.
    """

    @staticmethod
    def of(values: torch.Tensor) -> "EightBits":
        kept = torch.zeros_like(values).as_subclass(EightBits)
        return kept.quantize_(values)

    def quantize_(self, values: torch.Tensor) -> "EightBits":
        torch.Tensor.copy_(self.as_subclass(torch.Tensor), values.to(torch.float8_e4m3fn).to(values.dtype))
        return self

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def narrow(self, *place: int) -> torch.Tensor:
        return self.dequantize().narrow(*place)


VALUES = torch.linspace(-3, 3, 24).reshape(4, 6)


def test_a_plain_parameter_is_filled_in_place_and_read_without_a_copy():
    parameter = nn.Parameter(torch.full((4, 6), 7.0))
    assert not is_fp8_parameter(parameter)
    with filled(parameter) as values:
        values.narrow(0, 0, 3).copy_(VALUES[:3])
    assert torch.equal(parameter[:3], VALUES[:3]) and not parameter[3].any()
    read = plain_values(parameter)
    assert read.data_ptr() == parameter.data_ptr() and not read.requires_grad


def test_a_quantized_parameter_is_filled_whole_and_read_as_a_plain_tensor():
    parameter = EightBits.of(torch.full((4, 6), 7.0))
    assert is_fp8_parameter(parameter)
    with filled(parameter) as values:
        for half in (0, 2):
            values.narrow(0, half, 2).copy_(VALUES[half : half + 2])
    read = plain_values(parameter)
    assert type(read) is torch.Tensor
    assert torch.equal(read, VALUES.to(torch.float8_e4m3fn).float()) and not torch.equal(read, VALUES)


def test_loaded_numbers_wait_for_the_optimizer_on_trained_quantized_parameters_only():
    trained, frozen = (EightBits.of(VALUES).requires_grad_(is_trained) for is_trained in (True, False))
    plain = nn.Parameter(VALUES.clone())
    for parameter in (trained, frozen, plain):
        with torch.no_grad(), filled(parameter) as values:
            values.copy_(VALUES)
        keep_exact(parameter, values)
    assert torch.equal(vars(trained)["exact_values"], VALUES)
    assert not hasattr(frozen, "exact_values") and not hasattr(plain, "exact_values")
