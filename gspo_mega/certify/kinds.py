"""Names of what is compared of a critic. No torch: the table is drawn without it."""

from __future__ import annotations

# Beside the kinds of `compare_runs.Tolerance`; each tolerates what that one of the policy does.
CRITIC_KINDS = {"values": "log_prob", "value_gradient": "gradient", "value_weights": "weights"}
