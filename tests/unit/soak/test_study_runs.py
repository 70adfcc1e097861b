"""What a study's row says of the code that its run was made of."""

import subprocess

from study_runs import commit


def test_a_studys_own_rows_do_not_make_its_commit_dirty(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    rows, code = tmp_path / "docs" / "studies" / "claims_runs.csv", tmp_path / "package" / "module.py"
    for file in (rows, code):
        file.parent.mkdir(parents=True)
        file.write_text("one\n")
    assert commit(tmp_path) == "-", "no repository"
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean) == 12 and set(clean) <= set("0123456789abcdef")
    rows.write_text("one\ntwo\n")
    (tmp_path / "docs" / "notes.txt").write_text("not tracked\n")
    assert commit(tmp_path) == clean
    code.write_text("two\n")
    assert commit(tmp_path) == f"{clean}-dirty"
