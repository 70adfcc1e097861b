"""Small programs on the fake device whose memory, sends and waits are known by hand: prints what the ledger found.

Run as a process of its own, because the device has to be loaded before torch is.
"""

import gc
import json
import sys

from gspo_mega.cpu.fake_device import join_fake_world, load_device, pretend

load_device()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from gspo_mega.cpu.fake_kernels import compile_to_kernels  # noqa: E402
from gspo_mega.cpu.te_extension import extension  # noqa: E402
from gspo_mega.verify.trace.ledger import Ledger, fake_tensors  # noqa: E402
from gspo_mega.verify.trace.rank import cannot_be_traced  # noqa: E402

ROWS, WIDTH, INNER = 256, 512, 1024


class Model(nn.Module):
    def __init__(self, device: str, keeps: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False, device=device)
        self.down = nn.Linear(INNER, WIDTH, bias=False, device=device)
        self.keeps, self.kept = keeps, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.up(x))
        if self.keeps:
            self.kept = hidden.detach().clone()  # the retention
        return self.down(hidden)


def passes(device: str, model: Model, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(x).sum().backward()


def profiled_peak() -> int:
    """The peak of the same passes on the CPU, as PyTorch's own allocator reports it, above what was there before."""
    model, x = Model("cpu"), torch.ones(ROWS, WIDTH)
    passes("cpu", model, x)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        passes("cpu", model, x)
    now = peak = 0
    changes = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    for change in sorted(changes, key=lambda one: one.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


def traced(keeps: bool = False, gathers: int = 1, waits: bool = False) -> dict:
    ledger = Ledger()
    with fake_tensors(), ledger:
        with ledger.phase("build"):
            model = Model("cuda", keeps)
            x = torch.ones(ROWS, WIDTH, device="cuda")
        ledger.name_modules([model])
        ledger.mark("parameters", model.parameters())
        with ledger.phase("passes"):
            passes("cuda", model, x)
        with ledger.phase("rest"):
            whole = torch.empty(4 * WIDTH, INNER, device="cuda")
            for _ in range(gathers):
                dist.all_gather_into_tensor(whole, model.down.weight.view(WIDTH, INNER))
            del whole
            if waits:
                model.down.weight.grad.norm().item()
            for parameter in model.parameters():
                parameter.grad = None
        with ledger.phase("moved"):
            for parameter in model.parameters():
                parameter.untyped_storage().resize_(0)
    phases = {one.name: one for one in ledger.phases}
    one = phases["rest"]
    return {
        "before": phases["passes"].before,
        "passes": phases["passes"].peak,
        "peak": one.peak,
        "after": one.after,
        "moved": phases["moved"].after,
        "recorded": sum(held.num_bytes for held in one.left),
        "flops": dict(phases["passes"].flops),
        "collectives": [[*key, *value] for key, value in one.collectives.items()],
        "waits": dict(one.waits),
        "left": [[held.holder, held.num_bytes, held.where] for held in one.left],
        "stacks": [held.stack for held in one.at_peak if held.stack],
    }


def compiled() -> dict:
    """Three operations in one kernel: of what they allocate only the result takes memory, and stays."""
    ledger = Ledger()
    compile_to_kernels(ledger)
    kernel = torch.compile(lambda x: torch.sigmoid(2 * x) + 1)
    with fake_tensors(), ledger:
        x = torch.ones(ROWS, INNER, device="cuda")
        with ledger.phase("kernel") as phase:
            y = kernel(x)
        del y
    return {"before": phase.before, "peak": phase.peak, "after": phase.after}


def collected() -> str:
    """The garbage collector frees storages while the ledger copies what is live."""
    ledger = Ledger()
    with fake_tensors(), ledger, ledger.phase("cycles"):
        gc.disable()
        for _ in range(100):
            cycle: list = [torch.empty(WIDTH, device="cuda")]
            cycle.append(cycle)
        del cycle
        before = gc.get_threshold()
        gc.set_threshold(gc.get_count()[0] + 50)  # half of the copies are made by then
        gc.enable()
        try:
            ledger.live()
        except RuntimeError as error:
            return str(error)
        finally:
            gc.set_threshold(*before)
    return ""


def reads() -> dict:
    """Numbers that came from the host are known after simple operations on them; others are answered."""
    ledger = Ledger()
    with fake_tensors(), ledger, ledger.phase("reads") as phase:
        offsets = torch.tensor([0, 3, 7]).to("cuda")
        lengths = (offsets[1:] - offsets[:-1]).tolist()
        unknown = torch.empty(3, device="cuda").tolist()
        chosen = torch.empty(7, 2, device="cuda")[torch.tensor([True, False, True] + [False] * 4).to("cuda")]
    return {"lengths": lengths, "unknown": unknown, "chosen": list(chosen.shape), "waits": sum(phase.waits.values())}


def copied() -> dict:
    """Copies on the host take what they are, and page-locked ones what torch rounds them to."""
    ledger = Ledger()
    with fake_tensors(), ledger:
        x = torch.ones(3 * ROWS, INNER, device="cuda")
        with ledger.phase("copies") as phase:
            plain = x.cpu()
            locked = x.to("cpu", non_blocking=True)
            views = (plain[:ROWS], locked.view(-1))
            del plain, locked
        with ledger.phase("after") as after:
            del views
    return {
        "peak": phase.host_peak,
        "after": phase.host_after,
        "end": after.host_after,
        "held": [[held.holder, held.num_bytes, held.where] for held in phase.host_at_peak],
        "waits": sum(phase.waits.values()),
    }


def untraceable() -> list[str]:
    """What ends a trace: an operation whose result depends on numbers, and a kernel without a shape."""
    said = []
    with fake_tensors(), Ledger():
        for operation in (lambda: torch.empty(8, device="cuda").unique(), lambda: extension.made_up_kernel(1)):
            try:
                operation()
            except Exception as error:
                said.append(str(cannot_be_traced(3, error)))
    return said


if __name__ == "__main__":
    pretend((9, 0), "H100", 79 * 2**30)
    join_fake_world(0, 4)
    found = {
        "plain": traced(),
        "retention": traced(keeps=True),
        "gathered twice": traced(gathers=2),
        "waits": traced(waits=True),
        "reads": reads(),
        "compiled": compiled(),
        "collected": collected(),
        "copied": copied(),
        "untraceable": untraceable(),
    }
    # Last: with the fake device, real tensors of the CPU are real outside of the modes.
    found["profiled"] = profiled_peak()
    json.dump(found, sys.stdout)
