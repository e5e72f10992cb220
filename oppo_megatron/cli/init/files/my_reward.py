"""The reward of one response: write yours here."""


def score(prompt: str, response: str, fields: dict) -> float:
    """1 where the response contains the row's `answer`, else 0, as `oppo init` wrote it; write your own.

    Give a finite number for a finished response.  `fields` holds the row's other columns.  To raise ends the run.
    """
    if "answer" not in fields:
        raise KeyError(
            f"my_reward.py looks for the column `answer`, and this row has {sorted(fields)}: give the rows that column, "
            "or write in my_reward.py how a response is scored without it"
        )
    return 1.0 if str(fields["answer"]) in response else 0.0
