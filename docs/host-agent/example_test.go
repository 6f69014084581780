package mps_test

import (
	"context"
	"errors"
	"log"

	"yunion.io/mps"
)

// Stand-ins for the agent's own.
var (
	register func([]mps.GPU) error
	create   func(environment []mps.Variable, mounts []mps.Mount) (pid uint32, err error)
	stop     func(id string) error
	taken    map[string]bool
)

var client mps.Client

// At the start of the agent; Watch probes again after each change.
func watch(ctx context.Context) error {
	return client.Watch(ctx, func(ctx context.Context) error {
		gpus, err := client.GPUs(ctx) // Or Slices, for a platform with one row for each slice.
		if err != nil {
			return err // No list: the registered rows stay as they are.
		}
		return register(gpus)
	})
}

// For an agent that knows only the GPU; otherwise the name of the slice is the row's.
func createContainer(ctx context.Context, gpu string) error {
	slices, err := client.Slices(ctx)
	if err != nil {
		return err
	}
	slice, found := mps.FreeSlice(slices, gpu, taken)
	if !found {
		return errors.New("no free slice of " + gpu)
	}
	config, err := client.ContainerConfig(ctx, slice.Name)
	if err != nil {
		return err
	}
	pid, err := create(config.Environment, config.Mounts)
	if err != nil {
		return err
	}
	_, err = client.Bind(ctx, pid, "train-1", slice.Name)
	return err
}

func stopContainer(ctx context.Context, id string) error {
	if err := client.ReleaseContainer(ctx, id); err != nil {
		log.Printf("neighbours of container %s may suffer: %v", id, err)
	}
	return stop(id)
}
