"""The reward of one response."""


def score(prompt: str, response: str, fields: dict) -> float:
    """A finite number for a finished response.  `fields` holds the row's other columns.  To raise ends the run."""
    answer = fields.get("answer")
    if answer is not None:
        return 1.0 if str(answer) in response else 0.0
    return -abs(len(response.split()) - 50) / 50
