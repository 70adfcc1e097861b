"""The journal: every sampled episode on disk, one file per step, from which a run continues and replays."""
