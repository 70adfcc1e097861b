"""A run that trains adapters (`lora`), killed and continued: adapters, their moments and its random state are those of
the run that nothing interrupts.
"""

from __future__ import annotations

from recovery_support import KILLED, NUM_STEPS, digests, leftovers, outcome
from torch.distributed.checkpoint import FileSystemReader

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.models.low_rank import ADAPTER_FOLDER

# With dropout, a continued run has to draw the random numbers that come next.
ADAPTERS = "lora={rank: 4, alpha: 8, dropout: 0.1}"
# In the middle of the second step, and while its checkpoint is written.
KILLS = ("point=step.optimizer,hit=3,rank=1", "point=save.tensors.after")


def whole_outcome(folder: RunFolder) -> dict[str, object]:
    """`outcome`, with the result's PEFT folder."""
    adapter = folder.huggingface_dir.with_name(ADAPTER_FOLDER)
    return outcome(folder) | {f"{ADAPTER_FOLDER}/{name}": digest for name, digest in digests(adapter).items()}


def test_adapters_and_their_moments_continue_to_the_bit(ranks):
    assert ranks.train("lora", "", ADAPTERS, num_ranks=2) == [0, 0], ranks.log("lora")
    straight = whole_outcome(ranks.folder("lora"))
    for fault in KILLS:
        codes = ranks.train("lora-killed", fault, ADAPTERS, num_ranks=2)
        assert KILLED in codes, f"{fault}: {ranks.log('lora-killed')}"
    assert ranks.train("lora-killed", "", ADAPTERS, num_ranks=2) == [0, 0], ranks.log("lora-killed")
    found = whole_outcome(ranks.folder("lora-killed"))
    assert {key for key in found.keys() | straight.keys() if found.get(key) != straight.get(key)} == set()
    assert leftovers(ranks.folder("lora-killed")) == []
    assert f"{ADAPTER_FOLDER}/adapter_model.safetensors" in found
    norms = [line["lora/norm"] for line in read_metrics(ranks.folder("lora").metrics_file)]
    assert len(norms) == NUM_STEPS and 0 < norms[0] < norms[-1]
    (checkpoint,) = [entry for entry in ranks.folder("lora").checkpoints_dir.iterdir() if entry.is_dir()]
    names = set(FileSystemReader(str(checkpoint / "megatron")).read_metadata().state_dict_metadata)
    moments = {name for name in names if "exp_avg" in name}
    assert moments, f"the checkpoint holds no moments: {sorted(names)[:20]}"
