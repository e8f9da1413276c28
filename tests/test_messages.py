from support.messages import lines_naming, names, naming


def test_every_value_must_be_there_in_any_order() -> None:
    text = "k_steps=100 needs a_sync=True:\nset a_sync, or k_steps=0"
    assert names(text, "a_sync=True", "k_steps=100", 0)
    assert not names(text, "a_sync=True", "max_staleness")
    assert not names("", "a_sync")


def test_a_value_is_a_whole_word_or_number() -> None:
    for longer in ("160", "116", "0.16", "16.5", "1,600", "16,000", "lr16"):
        assert not names(f"found {longer}", 16)
    for text in ("16", "found 16.", "(16, 4)", "lr=16", "16 rows", "16,4"):
        assert names(text, 16)
    assert not names("lr_decay=1, 'alr'", "lr")
    assert names("'lr'=1", "lr")
    assert names("give --dgc", "--dgc")
    assert not names("give --dgc_configs", "--dgc")


def test_values_are_no_patterns() -> None:
    assert names("a.b (n, 4) C:\\x $1 [a]*", "a.b", "(n, 4)", "C:\\x", "$1", "[a]*")
    assert not names("aXb", "a.b")
    assert naming("a.b") != naming("aXb")


def test_values_may_be_asked_for_on_one_line() -> None:
    text = "rank 1 ends\nrank 0 ends with 7\n"
    assert lines_naming(text, "rank 0", 7) == ["rank 0 ends with 7"]
    assert lines_naming(text, "rank 1", 7) == []
