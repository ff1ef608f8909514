"""A process that pushes and pulls as it is told on its standard input, one JSON object a line.

The Hub client reads its environment once, when it is imported, so each environment needs a process of its own.
"""

import json
import sys
import traceback
import warnings


def texts_of(caught):
    # The Hub client and its HTTP library have deprecations of their own.
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def call(request):
    from t2n_hf.hub import pull_nnef_from_hub, push_nnef_to_hub

    function = {"push": push_nnef_to_hub, "pull": pull_nnef_from_hub}[request["call"]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(*request["args"], **request["options"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            kinds = [kind.__name__ for kind in type(error).__mro__]
            told = texts_of(caught)
            return {"error": kinds, "text": str(error), "trace": traceback.format_exc(), "warnings": told}
    answer = {"result": str(result), "warnings": texts_of(caught)}
    return answer | {name: getattr(result, name) for name in ("oid", "pr_url") if hasattr(result, name)}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(call(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
