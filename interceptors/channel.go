package interceptors

import (
	"context"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/belayrpc/belay/breaker"
	"github.com/belayrpc/belay/budget"
)

// channel is what a Client keeps for one ClientConn.
type channel struct {
	bank     *budget.Budget
	breakers *breaker.Group // by service; nil when breaking is off or not ours
	clock    clock
	grace    connectGrace
	hedges   hedging
	observed sync.Map     // full method → *latencies, where a policy asks for them
	watched  atomic.Int32 // entries of observed
	replay   atomic.Int64 // bytes that streams keep to send again
	demoted  demotions
}

// demotions are the methods whose server was seen not to honour keys. The zero
// value is ready.
type demotions struct {
	methods sync.Map     // full method → struct{}{}
	count   atomic.Int32 // entries of methods
}

// add reports whether a method is news. There are at most maxMethods; once that
// many promises were broken none is relied on, and nothing more is said.
func (d *demotions) add(method string) bool {
	if d.has(method) {
		return false
	}
	if _, known := d.methods.LoadOrStore(method, struct{}{}); known {
		return false
	}
	d.count.Add(1)
	return true
}

func (d *demotions) has(method string) bool {
	if d.count.Load() >= maxMethods {
		return true
	}
	_, known := d.methods.Load(method)
	return known
}

// channels finds the state of a ClientConn without keeping the ClientConn
// alive: an entry goes when the ClientConn is collected.
//
// The map's key is an address, because making a weak pointer takes a lock of
// the runtime's. An address may be used again before the entry of its former
// owner is removed, so an entry counts only if its weak pointer is this very
// ClientConn.
type channels struct {
	byAddress sync.Map // uintptr → *channelEntry

	// latest is the entry that was added last. Most Clients serve one ClientConn,
	// and so need not look further.
	latest atomic.Pointer[channelEntry]
}

type channelEntry struct {
	owner weak.Pointer[grpc.ClientConn]
	state *channel
}

func (c *channels) get(cc *grpc.ClientConn, create func() *channel) *channel {
	if e := c.latest.Load(); e != nil && e.owner.Value() == cc {
		return e.state
	}
	address := reflect.ValueOf(cc).Pointer()
	if e, ok := c.byAddress.Load(address); ok {
		if e := e.(*channelEntry); e.owner.Value() == cc { //nolint:forcetypeassert // the map holds nothing else
			return e.state
		}
	}
	return c.add(cc, address, create)
}

func (c *channels) add(cc *grpc.ClientConn, address uintptr, create func() *channel) *channel {
	entry := &channelEntry{owner: weak.Make(cc), state: create()}
	for {
		old, loaded := c.byAddress.LoadOrStore(address, entry)
		if loaded {
			if old := old.(*channelEntry); old.owner.Value() == cc { //nolint:forcetypeassert // as above
				return old.state // somebody was faster
			}
			if !c.byAddress.CompareAndSwap(address, old, entry) {
				continue
			}
		}
		c.latest.Store(entry)
		runtime.AddCleanup(cc, func(e *channelEntry) {
			c.byAddress.CompareAndDelete(address, e)
			c.latest.CompareAndSwap(e, nil)
		}, entry)
		return entry.state
	}
}

// maxConnectWaiters bounds the calls of one channel that wait for it to
// connect. Those beyond it do not wait: their next attempt fails at once.
const maxConnectWaiters = 256

// connectGrace bounds how long a channel that lost its connection is waited
// for: counted from the first attempt that could not be sent since one could. On
// a channel with few calls nobody may see that it has worked meanwhile, so where
// none has tried for a minute, and for twice the grace, the next call's counts as
// the first.
type connectGrace struct {
	since   atomic.Int64 // on the channel's clock; 0 while attempts are sent
	last    atomic.Int64 // when one could not be sent, as far as since is not 0
	waiters atomic.Int32
}

func (g *connectGrace) sent() {
	if g.since.Load() != 0 {
		g.since.Store(0)
	}
}

// graceSilence is how long nobody has tried a channel of which nothing is known
// any more.
const graceSilence = time.Minute

// notSent returns how much of the grace is left, starting it where it was not. A
// call's own wait between two attempts is no silence: only its first may find one.
func (g *connectGrace) notSent(t int64, grace time.Duration, first bool) time.Duration {
	last := g.last.Swap(t)
	since := g.since.Load()
	if silent := time.Duration(t - last); since == 0 || first && silent > graceSilence && silent/2 > grace {
		g.since.CompareAndSwap(since, t) // if not, somebody has seen the same just now
		since = t
	}
	return grace - time.Duration(t-since)
}

// wait blocks until cc is connected, limit passed or ctx is done.
func (g *connectGrace) wait(ctx context.Context, cc *grpc.ClientConn, limit time.Duration) {
	if cc == nil || limit <= 0 {
		return
	}
	if g.waiters.Add(1) > maxConnectWaiters {
		g.waiters.Add(-1)
		return
	}
	defer g.waiters.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		switch state := cc.GetState(); state {
		case connectivity.Ready, connectivity.Shutdown:
			return
		case connectivity.Idle:
			cc.Connect()
			fallthrough
		default:
			if !cc.WaitForStateChange(ctx, state) {
				return
			}
		}
	}
}
