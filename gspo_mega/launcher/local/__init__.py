"""The supervisor of one machine: its servers and ranks are children of this process."""
