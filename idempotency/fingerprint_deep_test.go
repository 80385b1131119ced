package idempotency_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/belayrpc/belay/idempotency"
	"github.com/belayrpc/belay/internal/probe/probev1"
)

// nestedNode is a leaf of so many bytes below so many levels of messages.
func nestedNode(levels int, leaf string) *probev1.Request {
	n := &probev1.Node{Name: leaf}
	for range levels {
		n = &probev1.Node{Children: map[string]*probev1.Node{"": n, "b": {Name: "b"}}}
	}
	return &probev1.Request{Node: n}
}

// TestFingerprintOfDeepRequest: what is deep down counts, however deep.
func TestFingerprintOfDeepRequest(t *testing.T) {
	f, err := idempotency.NewFingerprinter()
	if err != nil {
		t.Fatal(err)
	}
	for _, levels := range []int{1, 31, 32, 33, 64, 65, 4000} {
		a, _ := f.Of(nestedNode(levels, "a"))
		same, _ := f.Of(proto.Clone(nestedNode(levels, "a")))
		other, _ := f.Of(nestedNode(levels, "b"))
		deeper, _ := f.Of(nestedNode(levels+1, "a"))
		if a != same {
			t.Errorf("%d levels: equal requests differ", levels)
		}
		if a == other || a == deeper {
			t.Errorf("%d levels: different requests are equal", levels)
		}
	}
}

// TestFingerprintCostsNoMoreThanItsSize: a hostile request chooses how deep it
// is, and must not choose how often its bytes are moved. What is measured is the
// time a megabyte takes at 4000 levels, as a multiple of that at 20: 200 if each
// level moves all that is inside it.
func TestFingerprintCostsNoMoreThanItsSize(t *testing.T) {
	f, err := idempotency.NewFingerprinter()
	if err != nil {
		t.Fatal(err)
	}
	leaf := strings.Repeat("x", 1<<20)
	fastest := func(req *probev1.Request) time.Duration {
		best := time.Hour
		for range 3 {
			start := time.Now()
			f.Of(req)
			best = min(best, time.Since(start))
		}
		return best
	}
	shallow, deep := fastest(nestedNode(20, leaf)), fastest(nestedNode(4000, leaf))
	if deep > 40*shallow {
		t.Errorf("4000 levels took %v and 20 took %v", deep, shallow)
	}
}
