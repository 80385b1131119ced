package idempotency

// deepFrame is a frame that a new goroutine has no room for.
type deepFrame [12 << 10]byte

// deepen makes the stack of a new goroutine as deep as an execution needs it. A
// handler, its interceptors and a database's driver outgrow what a goroutine
// begins with; the stack is then doubled, again and again, and each time all
// frames are copied. It is cheaper to ask for as much while there is none.
//
// The check is made on entry, for the whole frame, so nobody has to touch it.
//
//go:noinline
func deepen(touch bool) {
	if touch {
		var frame deepFrame
		fill(&frame)
	}
}

//go:noinline
func fill(*deepFrame) {}
