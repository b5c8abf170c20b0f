from tests.diagrams import DOCUMENT, drawn


def test_the_diagrams_match_the_transition_tables() -> None:
    text = DOCUMENT.read_text()
    assert drawn(text) == text
