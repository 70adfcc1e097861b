"""What `gspo-mega report` says where it cannot write a report."""

from gspo_mega.cli.main import main


def test_what_cannot_be_reported_is_said(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "is not a run folder: it has neither attempts/ nor metrics.jsonl; valid: the folder <run.dir>/" in told
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "none" / "x.html")]) == 9
    told = capsys.readouterr().err
    assert "the report cannot be written: No such file or directory; choose another place: --out FILE" in told
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    assert main(["report", str(tmp_path)]) != 0
    assert "metrics.jsonl:2: is not a line of metrics" in capsys.readouterr().err
