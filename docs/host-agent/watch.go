package mps

import (
	"context"
	"errors"
	"time"

	"github.com/godbus/dbus/v5"
)

const (
	// Changes that follow each other this quickly are one.
	settle = 200 * time.Millisecond
	// The pause after a failure doubles from the first to the second.
	shortPause = time.Second
	longPause  = 30 * time.Second
)

// Watch calls probe at once, and again whenever the devices may have changed: after each DevicesChanged, and after a
// restart of the service or of the bus. If probe fails, or the bus does, Watch calls it again after a pause. It returns
// when ctx ends. Calls of probe follow each other; none is made at the same time as another.
func (c *Client) Watch(ctx context.Context, probe func(context.Context) error) error {
	var changes <-chan struct{}
	pause := shortPause
	for {
		var err error
		if changes == nil {
			// Before the probe, so that no change is missed.
			changes, err = c.subscribe(ctx)
		}
		if failure := probe(ctx); failure != nil {
			err = failure
		}
		var retry <-chan time.Time
		if err == nil {
			pause = shortPause
		} else {
			retry = time.After(pause)
			if pause *= 2; pause > longPause {
				pause = longPause
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-retry:
		case _, open := <-changes:
			// More of them may follow. A closed channel is the end of the connection.
			settled := time.After(settle)
			for waiting := true; waiting; {
				if !open {
					changes = nil
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-settled:
					waiting = false
				case _, open = <-changes:
				}
			}
		}
	}
}

// subscribe returns a channel that has a value while there are changes since the last look, and that is closed with
// its connection, which ends with ctx at the latest.
func (c *Client) subscribe(ctx context.Context) (<-chan struct{}, error) {
	conn, err := c.dial()
	if err != nil {
		return nil, err
	}
	signals := make(chan *dbus.Signal, 16)
	conn.Signal(signals)
	for _, match := range [][]dbus.MatchOption{
		{
			dbus.WithMatchSender(service),
			dbus.WithMatchInterface(service + ".Manager"),
			dbus.WithMatchMember("DevicesChanged"),
		},
		{
			dbus.WithMatchSender("org.freedesktop.DBus"),
			dbus.WithMatchMember("NameOwnerChanged"),
			dbus.WithMatchArg(0, service),
		},
	} {
		limited, cancel := context.WithTimeout(ctx, readTimeout)
		err := conn.AddMatchSignalContext(limited, match...)
		cancel()
		if err != nil {
			conn.Close()
			return nil, err
		}
	}
	sender, err := c.sender(ctx, conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		defer conn.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case signal, open := <-signals:
				if !open {
					return
				}
				if !sender.accepts(signal) {
					continue
				}
				select {
				case changes <- struct{}{}:
				default:
				}
			}
		}
	}()
	return changes, nil
}

// sender knows which connection to the bus the service has. Every user may send a signal to this program directly, and
// no match keeps such a signal out.
type sender struct{ owner string }

func (c *Client) sender(ctx context.Context, conn *dbus.Conn) (*sender, error) {
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	s := &sender{}
	err := conn.BusObject().CallWithContext(limited, "org.freedesktop.DBus.GetNameOwner", 0, service).Store(&s.owner)
	var refused dbus.Error
	if errors.As(err, &refused) && refused.Name == "org.freedesktop.DBus.Error.NameHasNoOwner" {
		err = nil
	}
	return s, err
}

// accepts says whether a signal comes from the service or from the bus, and follows the service to a new connection.
func (s *sender) accepts(signal *dbus.Signal) bool {
	switch {
	case signal.Sender == "org.freedesktop.DBus" && signal.Name == "org.freedesktop.DBus.NameOwnerChanged":
		if len(signal.Body) != 3 || signal.Body[0] != service {
			return false
		}
		owner, known := signal.Body[2].(string)
		s.owner = owner
		return known
	case signal.Name == service+".Manager.DevicesChanged":
		return s.owner != "" && signal.Sender == s.owner
	}
	return false
}
