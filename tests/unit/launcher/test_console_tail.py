from gspo_mega.launcher.children import ConsoleTail


def test_whole_lines_once_each_and_no_half_of_a_character(tmp_path):
    path, said = tmp_path / "console.log", []
    tail = ConsoleTail(path, said.append)
    tail.pump()
    with path.open("ab", buffering=0) as console:
        text = "step 1\n\nstep ü\n".encode()
        cut = text.index("ü".encode()) + 1
        console.write(text[:cut])
        tail.pump()
        assert said == ["step 1", ""]
        console.write(text[cut:])
    tail.pump()
    tail.pump()
    assert said == ["step 1", "", "step ü"]
