#!/usr/bin/python3
"""Asks a ValidatingAdmissionPolicy about objects, with CEL by its own authors: policy.py CEL POLICY

CEL is the folder with the module cel_expr_python. Standard input is a JSON list of [OBJECT, FORMER], as the API server has them
after its own checks: FORMER is null for an object that is new. For each it prints a line: the message of the validation that
refuses the object, "allowed", or "not asked".
"""

import json
import sys

import yaml

sys.path.insert(0, sys.argv[1])

from cel_expr_python import cel  # noqa: E402

ENVIRONMENT = cel.NewEnv(variables={name: cel.Type.DYN for name in ("object", "oldObject", "request", "variables")})

with open(sys.argv[2]) as text:
    POLICY = next(one for one in yaml.safe_load_all(text) if one["kind"] == "ValidatingAdmissionPolicy")["spec"]


def matches(rule, thing, operation):
    group, _, version = thing["apiVersion"].rpartition("/")
    asked = (group, version, operation, thing["kind"].lower() + "s")
    return all(one in rule[key] for one, key in zip(asked, ("apiGroups", "apiVersions", "operations", "resources")))


def verdict(thing, former):
    operation = "UPDATE" if former else "CREATE"
    if not any(matches(rule, thing, operation) for rule in POLICY["matchConstraints"]["resourceRules"]):
        return "not asked"
    known = {"object": thing, "oldObject": former, "request": {"operation": operation}, "variables": {}}

    def value(expression):
        return ENVIRONMENT.compile(expression).eval(data=known).plain_value()

    if not all(value(condition["expression"]) for condition in POLICY["matchConditions"]):
        return "not asked"
    for variable in POLICY["variables"]:
        known["variables"] = {**known["variables"], variable["name"]: value(variable["expression"])}
    refusals = (one["message"] for one in POLICY["validations"] if value(one["expression"]) is not True)
    return next(refusals, "allowed")


for pair in json.load(sys.stdin):
    print(verdict(*pair))
