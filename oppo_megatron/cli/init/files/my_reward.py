"""The reward of one response: write yours here."""


def score(prompt: str, response: str, fields: dict) -> float:
    """Return 1 if the response contains the row's `answer`, else 0.  This is an example; replace it by your own rule.

    Return a finite number for a finished response.  `fields` holds the row's other columns.  An exception ends the run.
    """
    if "answer" not in fields:
        raise KeyError(
            f"my_reward.py looks for the column `answer`, and this row has {sorted(fields)}: give the rows that column, "
            "or write in my_reward.py how a response is scored without it"
        )
    return 1.0 if str(fields["answer"]) in response else 0.0
