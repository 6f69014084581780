// Package mps asks yunion-mps-daemon for the GPUs of this host and for the slices that they are cut into. It is for an
// agent that starts containers, in place of nvidia-smi, lspci and the device file. example_test.go shows its use.
//
// An error is never an empty list: as long as a list can't be had, the rows that were registered before stay valid.
package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

const (
	service = "io.yunion.Mps1"
	manager = dbus.ObjectPath("/io/yunion/Mps1/Manager")
)

// Names of errors, as ErrorName returns them.
const (
	// NotReady means that the service does not know its GPUs yet. Ask again in a moment.
	NotReady = service + ".Error.NotReady"
	// NoSuchDevice means that nothing has this name, or nothing has it any more.
	NoSuchDevice = service + ".Error.NoSuchDevice"
	// Busy means that too many ask at once. Ask again in a moment.
	Busy = service + ".Error.Busy"
	// Failed is every other error of the service. The text is for people.
	Failed = service + ".Error.Failed"
	// NotRunning means that there is a bus, but the service is not on it.
	NotRunning = "org.freedesktop.DBus.Error.ServiceUnknown"
)

const (
	dialTimeout = 5 * time.Second
	readTimeout = 10 * time.Second
	// The service gives up after 30 seconds.
	releaseTimeout = 40 * time.Second
)

// addresses are the places of the system bus, in this order: the agent runs on the host itself or in a pod with the
// host's /run/dbus; it runs in a privileged pod with hostPID. No /var/run in the second: that is a link, and the kernel
// would follow it into the pod.
var addresses = []string{
	"unix:path=/run/dbus/system_bus_socket",
	"unix:path=/proc/1/root/run/dbus/system_bus_socket",
}

// Client asks the service. Its zero value is ready to use, by several goroutines too. It connects with the first call,
// and again with the first call after a restart of the bus.
type Client struct {
	// Address is the place of the bus. If it is empty, DBUS_SYSTEM_BUS_ADDRESS is, and otherwise the host's bus is
	// looked for.
	Address string

	mu   sync.Mutex
	conn *dbus.Conn
}

// Slices returns the slices in the order of the configuration: one row for each slice, as Cloudpods 4.0.3 and older
// know them. A slice that has disappeared from the list is no longer configured.
func (c *Client) Slices(ctx context.Context) ([]Slice, error) {
	var slices []Slice
	err := c.list(ctx, "ListDevices", &slices)
	return slices, err
}

// GPUs returns the GPUs in the order of the configuration: one row for each GPU, as Cloudpods after 4.0.3 knows them.
func (c *Client) GPUs(ctx context.Context) ([]GPU, error) {
	var gpus []GPU
	err := c.list(ctx, "ListGpus", &gpus)
	return gpus, err
}

// ContainerConfig returns what a container needs to be a client of these slices, given by their names. It has the memory
// and the threads of one slice of each GPU, however many slices of that GPU are named. For an agent that counts GPUs,
// FreeSlice chooses the slice.
func (c *Client) ContainerConfig(ctx context.Context, names ...string) (ContainerConfig, error) {
	var config ContainerConfig
	err := c.call(ctx, readTimeout, "Manager.GetContainerConfig",
		[]interface{}{&config.Environment, &config.Mounts, &config.GPUs}, names)
	return config, err
}

// Bind gives slices to the control group of a process, the first one of a container that does not run yet, most often: every
// process in there has these slices, and nobody else gets them. The name of a GPU stands for its lowest slice that is
// free. It returns the names of the slices. label is the container's name for people. The binding ends with the
// control group. A slice that is drained, not served or taken is an error with that ErrorName. Only root may call it.
func (c *Client) Bind(ctx context.Context, pid uint32, label string, names ...string) ([]string, error) {
	var bound []string
	options := map[string]dbus.Variant{"label": dbus.MakeVariant(label)}
	err := c.call(ctx, readTimeout, "Control.Bind", []interface{}{&bound}, names, pid, options)
	return bound, err
}

// ReleaseContainer ends the GPU work of a container, given by the 64 hexadecimal digits of its id, and returns when that
// is over; at once if there is none. Call it before the container is stopped: a signal that ends a CUDA program in the
// middle of a kernel is a fault for every client on that GPU. It takes 30 seconds at most. After an error, stop the
// container nevertheless and log the error, which names the processes. Only root may call it.
func (c *Client) ReleaseContainer(ctx context.Context, id string) error {
	return c.call(ctx, releaseTimeout, "Control.ReleaseContainer", nil, id)
}

// Close ends the connection, if there is one.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// ErrorName returns the name that an error has on D-Bus, and nothing for any other error.
func ErrorName(err error) string {
	var named dbus.Error
	if errors.As(err, &named) {
		return named.Name
	}
	return ""
}

func (c *Client) list(ctx context.Context, method string, rows interface{}) error {
	var answer []map[string]dbus.Variant
	if err := c.call(ctx, readTimeout, "Manager."+method, []interface{}{&answer}); err != nil {
		return err
	}
	if err := decode(answer, rows); err != nil {
		return fmt.Errorf("%s.Manager.%s: %w", service, method, err)
	}
	return nil
}

func (c *Client) call(
	ctx context.Context, limit time.Duration, method string, answer []interface{}, args ...interface{},
) error {
	conn, err := c.connection()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	call := conn.Object(service, manager).CallWithContext(ctx, service+"."+method, 0, args...)
	if err := call.Store(answer...); err != nil {
		return fmt.Errorf("%s.%s: %w", service, method, err)
	}
	return nil
}

func (c *Client) connection() (*dbus.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil && c.conn.Connected() {
		return c.conn, nil
	}
	conn, err := c.dial()
	c.conn = conn
	return conn, err
}

// dial connects to the first bus that answers.
func (c *Client) dial() (*dbus.Conn, error) {
	var complaints []string
	for _, address := range c.candidates() {
		conn, err := connect(address)
		if err == nil {
			return conn, nil
		}
		complaints = append(complaints, fmt.Sprintf("%s: %v", address, err))
	}
	return nil, fmt.Errorf("no system bus: %s", strings.Join(complaints, "; "))
}

func (c *Client) candidates() []string {
	if c.Address != "" {
		return []string{c.Address}
	}
	if address := os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"); address != "" {
		return []string{address}
	}
	return addresses
}

func connect(address string) (*dbus.Conn, error) {
	ctx, cancel := context.WithCancel(context.Background())
	// A bus that accepts the connection may still be silent.
	silence := time.AfterFunc(dialTimeout, cancel)
	conn, err := dbus.Connect(address, dbus.WithContext(ctx))
	if !silence.Stop() {
		err = fmt.Errorf("no answer within %v", dialTimeout)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return conn, nil
}
