package main

import "time"

var scaleExperiment = experiment{
	name:  "scale",
	title: "SCALE: 10,000 clients and 100 servers after a 30 s outage",
	text: `A simulation in fake time, with Belay's real bank and breaker packages and no gRPC. 10,000 clients make 4 calls a second each, to one of 100 servers at random; each server can do 500 a second, 25 % more than what comes. For 30 s all servers are out, and come back at once, with half of their capacity for the first 5 s (cold caches).
outage=gone: connections are refused at once. outage=answers: the servers answer UNAVAILABLE.
Modelled: each client's bank and breaker (one channel for all servers), full jitter, 4 attempts, users' deadline of 1 s, a queue in each server that drops what nobody waits for any more, each server's bank and its "do not retry", ConnectGrace, half-open probes.
Not modelled: how long connecting takes and gRPC's own reconnect backoff (clients can call the moment a server is back, which is the worst case for a herd), the network, the processor, load balancing that avoids a bad server.
full_s: from the servers' return until goodput is 99 % of what it was, for five seconds on; peak_over_mean: the fullest 100 ms at the servers after the return over the mean before the outage; lost: calls that fail after the return, in seconds' worth of calls; during: attempts for each call in the outage.`,
	cells: func(p plan) []cell {
		if p.repeats > 3 {
			p.repeats = 3 // each has tens of millions of events, and repeats hardly differ
		}
		return p.cross("scale", []string{stackNone, stackMiddleware, stackRatio, stackBelay, stackNoBreaker}, "outage=gone", "outage=answers")
	},
	run: runScale,
	plots: []plotSpec{
		{title: "Attempts at the servers per second; out from second 20 to 50, answering UNAVAILABLE", curve: "load", variant: "outage=answers", x: "seconds", y: "attempts/s"},
		{title: "Calls that succeed per second", curve: "goodput", variant: "outage=answers", x: "seconds", y: "calls/s"},
	},
}

const (
	scaleGoneAt = 20 * time.Second
	scaleBackAt = 50 * time.Second
	scaleCold   = 5 * time.Second
	scaleEnd    = 90 * time.Second
	scaleBin    = 100 * time.Millisecond
)

func runScale(w *world) (outcome, error) {
	clients, servers := 10_000, 100
	if w.cell.Quick {
		clients, servers = 500, 5
	}
	s := newSimulation(w.cell.Stack, w.random(1), clients, servers)
	s.answers = w.cell.text("outage") == "answers"
	s.run(scaleEnd)

	mean := scaleMean(s.arrived, 10*time.Second, scaleGoneAt)
	before := scaleMean(s.ok, 10*time.Second, scaleGoneAt)
	var peak, lost float64
	for i := int(scaleBackAt / scaleBin); i < len(s.arrived); i++ {
		peak = max(peak, s.arrived[i])
		lost += s.failed[i]
	}
	var o outcome
	o.add("full_s", scaleFull(s.ok, 0.99*before).Seconds())
	o.add("peak_over_mean", peak/mean)
	o.add("lost_s", lost/(before/scaleBin.Seconds()))
	calls := scaleMean(s.begun, scaleGoneAt, scaleBackAt)
	o.add("during", scaleMean(s.tried, scaleGoneAt, scaleBackAt)/calls)
	o.add("success", scaleMean(s.ok, scaleBackAt, scaleEnd)/scaleMean(s.begun, scaleBackAt, scaleEnd))

	seconds := func(plot string, bins []float64) curve {
		c := curve{Plot: plot}
		const step = 5
		for i := 0; i+step <= len(bins); i += step {
			sum := 0.0
			for _, n := range bins[i : i+step] {
				sum += n
			}
			c.X = append(c.X, float64(i)*scaleBin.Seconds())
			c.Y = append(c.Y, sum/(step*scaleBin.Seconds()))
		}
		return c
	}
	o.Curves = []curve{seconds("load", s.arrived), seconds("goodput", s.ok)}
	return o, nil
}

// scaleMean is the mean of the bins of a stretch of time.
func scaleMean(bins []float64, from, to time.Duration) float64 {
	part := bins[from/scaleBin : to/scaleBin]
	sum := 0.0
	for _, n := range part {
		sum += n
	}
	return sum / float64(len(part))
}

// scaleFull is how long after the servers' return goodput begins to be enough
// for five seconds on; the rest of the run where it never is.
func scaleFull(ok []float64, enough float64) time.Duration {
	const hold = 5 * time.Second
	for at := scaleBackAt; at+hold <= scaleEnd; at += scaleBin {
		if scaleMean(ok, at, at+hold) >= enough && scaleMean(ok, at, at+time.Second) >= enough {
			return at - scaleBackAt
		}
	}
	return scaleEnd - scaleBackAt
}
