package overlay_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/belayrpc/belay/examples/internal/overlay"
)

func TestWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.go")
	const source = "one two, two\n"
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := overlay.Write(t.TempDir(), file, "one", "three")
	if err != nil {
		t.Fatal(err)
	}
	var read map[string]map[string]string
	data, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &read); err != nil {
		t.Fatal(err)
	}
	changed, err := os.ReadFile(read["Replace"][file])
	if err != nil || string(changed) != "three two, two\n" {
		t.Errorf("the copy is %q (%v)", changed, err)
	}
	if kept, _ := os.ReadFile(file); string(kept) != source {
		t.Errorf("the file itself is %q now", kept)
	}

	for text, want := range map[string]string{"two": "has 2 places", "four": "has 0 places"} {
		if _, err := overlay.Write(t.TempDir(), file, text, ""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("changing %q: %v, want an error with %q", text, err, want)
		}
	}
}
