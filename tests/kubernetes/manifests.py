#!/usr/bin/python3
"""Reads manifests strictly, by the types that Kubernetes' own OpenAPI description has: manifests.py TYPES FILE...

TYPES is the folder with these types, the module kubernetes.client. A key that no type has, a value of another type and a key
that is missing are errors. It prints the kind of each object.
"""

import datetime
import re
import sys

import yaml

sys.path.insert(0, sys.argv[1])

import kubernetes.client as types  # noqa: E402

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": datetime.datetime}


def read(value, kind, place):
    """Makes what the types say of a value, or says where it is wrong."""
    of_list, of_dict = re.fullmatch(r"list\[(.*)\]", kind), re.fullmatch(r"dict\(str, (.*)\)", kind)
    # All that is left but the plain kinds, which are looked at below, is a mapping.
    form = list if of_list else object if kind in (*PLAIN, "object") else dict
    if not isinstance(value, form):
        sys.exit(f"{place}: {value!r} is no {kind}")
    if of_list:
        return [read(one, of_list[1], f"{place}[{number}]") for number, one in enumerate(value)]
    if of_dict and re.search(r"\.(limits|requests)$", place):
        # Quantities, which may be numbers.
        return {key: str(one) for key, one in value.items()}
    if of_dict:
        return {key: read(one, of_dict[1], f"{place}.{key}") for key, one in value.items()}
    if kind == "object":
        return value
    if kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            sys.exit(f"{place}: {value!r} is no {kind}")
        return value
    model = getattr(types, kind)
    names = {key: name for name, key in model.attribute_map.items()}
    unknown = set(value) - set(names)
    if unknown:
        sys.exit(f"{place}: {kind} has no {', '.join(sorted(unknown))}")
    parts = {names[key]: read(one, model.openapi_types[names[key]], f"{place}.{key}") for key, one in value.items()}
    try:
        return model(**parts)
    except ValueError as error:
        sys.exit(f"{place}: {error}")


for file in sys.argv[2:]:
    with open(file) as text:
        for document in yaml.safe_load_all(text):
            version, kind = document["apiVersion"], document["kind"]
            read(document, version.split("/")[-1].capitalize() + kind, f"{file}: {kind}")
            print(kind)
