"""Runs features of a client and prints what came back, one JSON object a line."""

import json
import sys
import traceback


def canonical(name, arguments):
    """A tool call as all drivers write it."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return name + " " + json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def run(features):
    for name, feature in features.items():
        line = {"feature": name}
        try:
            line["got"] = feature()
        except Exception as e:  # the test says what was expected
            line["error"] = type(e).__name__ + ": " + str(e)[:500]
            print(traceback.format_exc(), file=sys.stderr)
        print(json.dumps(line, ensure_ascii=False), flush=True)
