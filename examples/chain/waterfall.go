package main

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// What the waterfall reads of Belay's spans.
const (
	attrAttempt = "belay.attempt.number"
	attrCode    = "rpc.response.status_code"
	attrKey     = "belay.idempotency.status"
	attrStop    = "belay.stop"
	attrDelay   = "belay.retry.delay"
)

// tellingTrace picks the trace that shows most with least: one that went
// through all the processes and has a retry; rather with a reply from the
// record than without; of those the shortest.
func tellingTrace(traces map[string][]*span) []*span {
	var best []*span
	score := func(t []*span) int {
		if len(t) == 0 {
			return 0
		}
		services, retries, replays := map[string]bool{}, 0, 0
		for _, s := range t {
			services[s.Service] = true
			if n, err := strconv.Atoi(s.Attrs[attrAttempt]); err == nil && n > 1 {
				retries = 1
			}
			if s.Attrs[attrKey] == "replayed" {
				replays = 1
			}
		}
		if len(services) <= len(roles) || retries == 0 { // the user is one more
			return 0
		}
		return 1 + replays
	}
	for _, t := range traces {
		a, b := score(t), score(best)
		if a > b || a > 0 && a == b && shorter(t, best) {
			best = t
		}
	}
	return best
}

// shorter compares by spans and, where these are as many, by time.
func shorter(a, b []*span) bool {
	if len(a) != len(b) {
		return len(a) < len(b)
	}
	return extent(a) < extent(b)
}

// extent is the time from the first start to the last end.
func extent(spans []*span) time.Duration {
	start, end := bounds(spans)
	return end.Sub(start)
}

func bounds(spans []*span) (start, end time.Time) {
	for _, s := range spans {
		if start.IsZero() || s.Start.Before(start) {
			start = s.Start
		}
		if s.End.After(end) {
			end = s.End
		}
	}
	return start, end
}

// bestTrace picks one of the results' traces.
func bestTrace(results []result) (result, bool) {
	for _, name := range []string{"reply-lost", "blips-10", "restart"} {
		for _, r := range results {
			if r.scenario == name && r.trace != nil {
				return r, true
			}
		}
	}
	return result{}, false
}

const (
	nameWidth = 58
	barWidth  = 48
)

// waterfall draws one trace.
type waterfall struct {
	out      *bytes.Buffer
	children map[string][]*span
	start    time.Time
	length   time.Duration
}

// writeWaterfall draws a trace: a line for each span and one for each event.
func writeWaterfall(out *bytes.Buffer, spans []*span) {
	w := waterfall{out: out, children: map[string][]*span{}}
	known := map[string]bool{}
	w.start, _ = bounds(spans)
	w.length = extent(spans)
	for _, s := range spans {
		known[s.ID] = true
	}
	for _, s := range spans {
		parent := s.Parent
		if !known[parent] {
			parent = "" // a root, or a span whose process died with its parent
		}
		w.children[parent] = append(w.children[parent], s)
	}
	for _, list := range w.children {
		slices.SortFunc(list, func(a, b *span) int { return a.Start.Compare(b.Start) })
	}
	w.below(nil, "", "")
}

// below draws the children of a span and its events, in the order of time.
func (w *waterfall) below(parent *span, service, indent string) {
	var id string
	var events []spanEvent
	if parent != nil {
		id, events = parent.ID, parent.Events
	}
	for _, s := range w.children[id] {
		for len(events) > 0 && events[0].At.Before(s.Start) {
			w.event(events[0], indent)
			events = events[1:]
		}
		who := ""
		if s.Service != service {
			who = s.Service
		}
		w.line(who, indent+title(s), w.bar(s), fmt.Sprintf("%.2f ms", millis(s.End.Sub(s.Start))))
		w.below(s, s.Service, indent+"  ")
	}
	for _, e := range events {
		w.event(e, indent)
	}
}

func (w *waterfall) event(e spanEvent, indent string) {
	w.line("", indent+"• "+eventTitle(e), w.mark(e.At), "")
}

func (w *waterfall) line(who, name, bar, took string) {
	pad := strings.Repeat(" ", max(0, nameWidth-utf8.RuneCountInString(name)))
	fmt.Fprintln(w.out, strings.TrimRight(fmt.Sprintf("%-9s%s%s │%s│ %s", who, name, pad, bar, took), " "))
}

// title says what a span is and how it went.
func title(s *span) string {
	name := strings.ReplaceAll(s.Name, "belay.chain.v1.", "")
	if n := s.Attrs[attrAttempt]; n != "" {
		name = "attempt " + n
	}
	if s.Kind == "server" {
		name += " (server)"
	}
	var notes []string
	if d, err := strconv.ParseFloat(s.Attrs[attrDelay], 64); err == nil && d > 0 {
		notes = append(notes, fmt.Sprintf("after %.1f ms", d*1e3))
	}
	if code := s.Attrs[attrCode]; code != "" && code != "OK" {
		notes = append(notes, code)
	}
	if stop := s.Attrs[attrStop]; stop != "" {
		notes = append(notes, "stopped: "+stop)
	}
	if status := s.Attrs[attrKey]; status != "" {
		notes = append(notes, "key "+status)
	}
	if len(notes) > 0 {
		name += " · " + strings.Join(notes, " · ")
	}
	return name
}

func eventTitle(e spanEvent) string {
	if d, err := strconv.ParseFloat(e.Attrs[attrDelay], 64); err == nil {
		return fmt.Sprintf("%s %.1f ms", e.Name, d*1e3)
	}
	return e.Name
}

// column is where a moment stands in the bars.
func (w *waterfall) column(t time.Time) int {
	if w.length <= 0 {
		return 0
	}
	return min(barWidth-1, max(0, int(float64(t.Sub(w.start))/float64(w.length)*barWidth)))
}

func (w *waterfall) bar(s *span) string {
	sign := "█"
	if s.Failed {
		sign = "▒"
	}
	from, to := w.column(s.Start), w.column(s.End)
	return strings.Repeat(" ", from) + strings.Repeat(sign, to-from+1) + strings.Repeat(" ", barWidth-1-to)
}

func (w *waterfall) mark(t time.Time) string {
	at := w.column(t)
	return strings.Repeat(" ", at) + "◆" + strings.Repeat(" ", barWidth-1-at)
}
