"""What of metrics, profile and alerts cannot be meant."""

import pytest
from config_refusals import refused


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("profile.steps=[3, 2]", "profile.steps", "[3, 2] has its last step before its first"),
        ("profile.ranks=[0, 2]", "profile.ranks", "there is no rank 2; valid: 0 to 0"),
        (
            "metrics.prometheus={port: 9464, host: 0.0.0.0}",
            "metrics.prometheus.host",
            "opens the server to every network",
        ),
        ("alerts.on=[failure]", "alerts", "notifies nobody; give command, url or both"),
        ("alerts.url=ftp://host/x", "alerts.url", "must begin with http:// or https://, or be $NAME of an environment"),
    ],
)
def test_contradictions_are_refused_by_key(write, override, key, said):
    text = refused(write(), override)
    assert f": {key}: " in text and said in text
    assert len(text.splitlines()) == 1
