// mps-agent prints what an agent sees of the service, as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"yunion.io/mps"
)

const usage = `usage: mps-agent probe             the slices and the GPUs
       mps-agent watch             the same again with every change, one line each
       mps-agent config NAME...    what a container needs for these slices
       mps-agent bind PID NAME...  gives these slices to the control group of a process
       mps-agent release ID        ends the GPU work of a container
`

type seen struct {
	Slices []mps.Slice `json:"slices"`
	GPUs   []mps.GPU   `json:"gpus"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client := &mps.Client{}
	defer client.Close()
	if err := run(ctx, client, os.Args[1:]); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "mps-agent:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, client *mps.Client, args []string) error {
	switch {
	case len(args) == 1 && args[0] == "probe":
		return probe(ctx, client)
	case len(args) == 1 && args[0] == "watch":
		return client.Watch(ctx, func(ctx context.Context) error {
			err := probe(ctx, client)
			if err != nil {
				show(map[string]string{"error": mps.ErrorName(err), "text": err.Error()})
			}
			return err
		})
	case len(args) >= 2 && args[0] == "config":
		config, err := client.ContainerConfig(ctx, args[1:]...)
		if err != nil {
			return err
		}
		return show(config)
	case len(args) >= 3 && args[0] == "bind":
		pid, err := strconv.ParseUint(args[1], 10, 32)
		if err != nil {
			return err
		}
		bound, err := client.Bind(ctx, uint32(pid), "mps-agent", args[2:]...)
		if err != nil {
			return err
		}
		return show(bound)
	case len(args) == 2 && args[0] == "release":
		return client.ReleaseContainer(ctx, args[1])
	}
	fmt.Fprint(os.Stderr, usage)
	os.Exit(2)
	return nil
}

func probe(ctx context.Context, client *mps.Client) error {
	slices, err := client.Slices(ctx)
	if err != nil {
		return err
	}
	gpus, err := client.GPUs(ctx)
	if err != nil {
		return err
	}
	return show(seen{slices, gpus})
}

func show(value interface{}) error {
	return json.NewEncoder(os.Stdout).Encode(value)
}
