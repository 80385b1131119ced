// Package overlay builds with one line of the source changed, and leaves the
// source alone: it writes what `go build -overlay` reads. A check that finds
// nothing in the code as it is proves something only if it finds what is wrong
// with a mutant.
package overlay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Write puts a copy of the file, with text replaced by another, into dir, and
// beside it the list that makes the go command read the copy in the file's
// place. It returns the list's path. One dir takes one overlay; file must be an
// absolute path.
//
// The text must be in the file exactly once: a mutant that is out of date is an
// error, not a change that does nothing.
func Write(dir, file, text, other string) (list string, err error) {
	source, err := os.ReadFile(file) //nolint:gosec // of this very tree
	if err != nil {
		return "", err
	}
	if n := bytes.Count(source, []byte(text)); n != 1 {
		return "", fmt.Errorf("%s has %d places to change: must have 1; bring the mutant up to date with the file:\n%s", file, n, text)
	}
	changed := filepath.Join(dir, filepath.Base(file))
	if err := os.WriteFile(changed, bytes.Replace(source, []byte(text), []byte(other), 1), 0o600); err != nil { //nolint:gosec // in a folder of the caller's
		return "", err
	}
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {file: changed}})
	if err != nil {
		return "", err
	}
	list = filepath.Join(dir, "overlay.json")
	return list, os.WriteFile(list, replace, 0o600)
}
