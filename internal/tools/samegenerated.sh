#!/usr/bin/env bash
# samegenerated.sh DIR: the generated files in DIR, and no others, are those in
# this tree. Compared with a second copy and not by `git diff`, so that it also
# works in an archive, in a tree with other changes, and on files not yet added.
set -euo pipefail
fresh=$1

generated() { (cd "$1" && find . -name '*.pb.go' -not -path './.git/*' | LC_ALL=C sort); }

if ! diff -u --label 'in the tree' <(generated .) --label 'generated now' <(generated "$fresh"); then
	echo "the tree has other generated files than its protos ask for: run 'make generate', delete what has no proto" >&2
	exit 1
fi

stale=0
while read -r file; do
	diff -u --label "$file" "$file" --label "$file (generated now)" "$fresh/$file" || stale=1
done < <(generated "$fresh")
if ((stale)); then
	echo "generated code is out of date: run 'make generate'" >&2
	exit 1
fi
