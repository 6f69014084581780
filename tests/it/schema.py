"""Holds JSON documents (one a line on stdin) against a schema of docs/schemas, more strictly than a consumer may: an
object has no key that the schema does not have. Prints the keys of the schema, and the keys of the documents.
"""
import json
import sys

import jsonschema

schema = json.load(open(sys.argv[1]))
jsonschema.Draft202012Validator.check_schema(schema)


def resolved(part):
    if "$ref" in part:
        return schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
    for one in part.get("oneOf", []):
        if "$ref" in one:
            return resolved(one)
    return part


def strict(part):
    if isinstance(part, list):
        return [strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    part = {key: strict(value) for key, value in part.items()}
    if isinstance(part.get("properties"), dict) and "type" in part:
        part.setdefault("additionalProperties", False)
    return part


def documented(part, path):
    part = resolved(part)
    for key, one in part.get("properties", {}).items():
        assert one.get("description"), f"{path}.{key} has no description"
        yield f"{path}.{key}"
        yield from documented(one, f"{path}.{key}")
    if "items" in part:
        yield from documented(part["items"], path + "[]")
    if isinstance(part.get("additionalProperties"), dict):
        yield from documented(part["additionalProperties"], path + ".*")


def present(part, value, path):
    part = resolved(part)
    if isinstance(value, dict):
        for key, one in value.items():
            if key in part.get("properties", {}):
                yield f"{path}.{key}"
                yield from present(part["properties"][key], one, f"{path}.{key}")
            else:
                yield from present(part["additionalProperties"], one, path + ".*")
    elif isinstance(value, list):
        for one in value:
            yield from present(part["items"], one, path + "[]")


validator = jsonschema.Draft202012Validator(strict(schema))
documents = [json.loads(line) for line in sys.stdin]
for document in documents:
    validator.validate(document)
found = {path for document in documents for path in present(schema, document, "")}
print(json.dumps({"documented": sorted(set(documented(schema, ""))), "present": sorted(found)}))
