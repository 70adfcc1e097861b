"""The host does not wait for the device once per micro-batch: the queue of a GPU would run empty each time."""

from layout_models import make_folder


def test_reads_do_not_grow_with_the_micro_batches_and_what_is_not_finite_trains_nothing(rank_pools, tmp_path):
    found = rank_pools(1).run("device_read_jobs:reads", folder=str(make_folder(tmp_path / "dense", moe=False)))[0]
    for kind in ("old", "train"):
        for num in (1, 3):
            (read,) = found[num][kind]  # one per pass
            assert read.startswith("tolist at algorithm/terms.py")
    assert "old_log_probs is nan at active token 3, sequence 0" in found["error"] and found["same"]
