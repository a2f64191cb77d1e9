"""Writes internal/classify/data/lexicon.txt.gz: words with what they can be.

Usage: lexicon.py FAKER_DIR COMPLEXITY_JSONL OUT
FAKER_DIR is the unpacked Python package Faker (MIT), whose lists of names,
places and filler words are read without importing it. Words that stand in lower
case in the prompts of COMPLEXITY_JSONL (MIT, Apache-2.0, CC-BY-4.0 sources, see
the model card) count as common. The output is sorted, so it can be compared.
"""
import ast, collections, gzip, io, json, os, re, sys, unicodedata

FIRST, LAST, PLACE, STREET = "f", "l", "g", "s"


def fold(s):
    s = unicodedata.normalize("NFKD", s.lower().replace("ß", "ss").replace("ø", "o").replace("ł", "l").replace("đ", "d").replace("ı", "i").replace("æ", "ae").replace("ς", "σ"))
    return "".join(c for c in s if not unicodedata.combining(c))


def strings(node):
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            yield n.value


def lists(path):
    tree = ast.parse(open(path, encoding="utf-8").read())
    for n in ast.walk(tree):
        if isinstance(n, ast.Assign):
            for t in n.targets:
                if isinstance(t, ast.Name):
                    yield t.id, list(strings(n.value))
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is not None:
            yield n.target.id, list(strings(n.value))


word = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")


def main(faker, complexity, out):
    flags = collections.defaultdict(set)

    def add(values, flag, shortest=2):
        for v in values:
            if "{" in v or "%" in v or "#" in v:
                continue
            for w in word.findall(v):
                w = fold(w)
                if len(w) >= shortest and not re.search(r"[\u2e80-\u9fff\uac00-\ud7af\u3040-\u30ff]", w):
                    flags[w].add(flag)

    root = os.path.join(faker, "providers")
    for d in sorted(os.listdir(os.path.join(root, "person"))):
        p = os.path.join(root, "person", d, "__init__.py")
        if not os.path.exists(p):
            continue
        for name, values in lists(p):
            if name.startswith("first_name") or name in ("firstnames", "middle_names"):
                add(values, FIRST)
            elif name.startswith("last_name") or name.startswith("lastname") or name == "parents":
                add(values, LAST)
    for d in sorted(os.listdir(os.path.join(root, "address"))):
        p = os.path.join(root, "address", d, "__init__.py")
        if not os.path.exists(p):
            continue
        for name, values in lists(p):
            if name in ("cities", "countries", "states", "provinces", "regions", "municipalities", "counties", "districts", "departments", "city_names", "city_name", "prefectures", "cantons"):
                add(values, PLACE, 3)
            elif name in ("street_suffixes", "street_prefixes", "street_suffixes_long", "street_suffixes_short", "street_prefixes_long"):
                add(values, STREET)
    count = collections.Counter()
    for line in open(complexity, encoding="utf-8"):
        for w in re.findall(r"(?<=[a-z,] )[a-z]{2,}(?![\w@.])", json.loads(line)["prompt"]):
            count[w] += 1
    common = {w for w, n in count.items() if n >= 2}
    for d in sorted(os.listdir(os.path.join(root, "lorem"))):
        p = os.path.join(root, "lorem", d, "__init__.py")
        if d in ("la",) or not os.path.exists(p):
            continue
        for name, values in lists(p):
            if name == "word_list":
                common.update(fold(w) for v in values for w in word.findall(v) if v == v.lower() and len(w) > 1)
    for w in common:
        if not re.search(r"[\u2e80-\u9fff\uac00-\ud7af\u3040-\u30ff]", w):
            flags[w].add("W" if count[w] >= 8 else "w")
    # Particles of names are words of their own; the tagger knows them.
    text = "".join(f"{w}\t{''.join(sorted(fl))}\n" for w, fl in sorted(flags.items()))
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, compresslevel=9) as z:
        z.write(text.encode())
    open(out, "wb").write(raw.getvalue())
    print(len(flags), "words,", len(text), "bytes,", len(raw.getvalue()), "compressed")
    print(collections.Counter("".join(sorted(f)) for f in flags.values()).most_common(20))


main(*sys.argv[1:])
