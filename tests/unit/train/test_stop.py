from gspo_mega.base.run_folder import RunFolder
from gspo_mega.train.context import StopRequest


def test_a_request_is_seen_with_its_first_reason(tmp_path):
    attempt = RunFolder(tmp_path).new_attempt()
    stop = StopRequest(attempt.path)
    assert stop.check() is None
    attempt.request_stop("SIGTERM")
    stop.make("SIGINT")
    assert stop.check() == "SIGTERM"


def test_a_new_attempt_starts_without_the_old_ones_request(tmp_path):
    folder = RunFolder(tmp_path)
    folder.new_attempt().request_stop("SIGTERM")
    assert StopRequest(folder.new_attempt().path).check() is None


def test_an_empty_file_made_by_hand_is_a_request_too(tmp_path):
    attempt = RunFolder(tmp_path).new_attempt()
    attempt.stop_file.touch()
    assert StopRequest(attempt.path).check() == "asked by hand"
