package mps

import (
	"encoding/json"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/godbus/dbus/v5"
)

// The slice of the platform's own guide.
func slice() map[string]dbus.Variant {
	row := map[string]dbus.Variant{}
	for key, value := range map[string]interface{}{
		"addr": "00:06.0-1", "base_addr": "00:06.0", "name": "00:06.0-1", "pci_bdf": "0000:00:06.0",
		"dev_type": "NVIDIA_MPS", "vendor_device_id": "10de:1b38", "model": "Tesla P40",
		"device_path": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", "numa_node": int32(-1),
		"pcie_info": map[string]dbus.Variant{
			"lane_width": dbus.MakeVariant(int32(16)), "throughput": dbus.MakeVariant("15.76 GB/s"),
			"transfer_rate_per_lane": dbus.MakeVariant("8GT/s"), "version": dbus.MakeVariant("3.0"),
		},
		"mps_memory_total": int32(23040), "mps_memory_limit": int32(5760), "memory_size": int32(5760),
		"mps_thread_percentage": int32(25), "detected_on_host": true, "servable": true, "healthy": true,
		"nvidia_index": uint32(0), "ordinal": uint32(1), "index": int32(-1), "device_minor": int32(-1),
	} {
		row[key] = dbus.MakeVariant(value)
	}
	return row
}

func TestDecode(t *testing.T) {
	row := slice()
	row["key_of_a_later_version"] = dbus.MakeVariant([]uint32{1})
	var slices []Slice
	if err := decode([]map[string]dbus.Variant{row}, &slices); err != nil {
		t.Fatal(err)
	}
	zero := uint32(0)
	want := []Slice{{
		Device: Device{
			Addr: "00:06.0-1", Name: "00:06.0-1", BaseAddr: "00:06.0", PCIBDF: "0000:00:06.0",
			DevType: "NVIDIA_MPS", VendorDeviceID: "10de:1b38", Model: "Tesla P40",
			DevicePath: "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400", NumaNode: -1,
			PCIEInfo:       &PCIEInfo{"8GT/s", 16, "15.76 GB/s", "3.0"},
			MPSMemoryTotal: 23040, MPSMemoryLimit: 5760, MemorySize: 5760, MPSThreadPercentage: 25,
			DetectedOnHost: true, Servable: true, Healthy: true, NvidiaIndex: &zero,
		},
		Ordinal: 1, Index: -1, DeviceMinor: -1,
	}}
	if !reflect.DeepEqual(slices, want) {
		t.Errorf("got %+v, want %+v", slices, want)
	}
}

func TestDecodeKeepsUnknownApartFromZero(t *testing.T) {
	known := slice()
	known["clients"] = dbus.MakeVariant(uint32(0))
	var slices []Slice
	if err := decode([]map[string]dbus.Variant{slice(), known}, &slices); err != nil {
		t.Fatal(err)
	}
	if slices[0].Clients != nil || slices[1].Clients == nil || *slices[1].Clients != 0 {
		t.Errorf("%v and %v", slices[0].Clients, slices[1].Clients)
	}
}

// One row that can't be read is no reason to lose the row: the platform would purge it.
func TestDecodeRefusesAnotherType(t *testing.T) {
	row := slice()
	row["numa_node"] = dbus.MakeVariant("none")
	var slices []Slice
	err := decode([]map[string]dbus.Variant{slice(), row}, &slices)
	if err == nil || !strings.Contains(err.Error(), "numa_node") {
		t.Errorf("got %v", err)
	}
}

// The executor's way: the output of `yunion-mpsctl list --json` is the same.
func TestJSON(t *testing.T) {
	var slices, again []Slice
	if err := decode([]map[string]dbus.Variant{slice()}, &slices); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(slices)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &again); err != nil || !reflect.DeepEqual(slices, again) {
		t.Errorf("%v: %s", err, text)
	}
}

func TestContainerConfig(t *testing.T) {
	var config ContainerConfig
	err := dbus.Store([]interface{}{
		[][]interface{}{{"CUDA_MPS_PIPE_DIRECTORY", "/run/yunion-mps"}},
		[][]interface{}{{"/tmp/nvidia-mps/pipe/slices/00_06.0-1", "/run/yunion-mps", true}},
		[]string{"GPU-76aef7ff"},
	}, &config.Environment, &config.Mounts, &config.GPUs)
	want := ContainerConfig{
		[]Variable{{"CUDA_MPS_PIPE_DIRECTORY", "/run/yunion-mps"}},
		[]Mount{{"/tmp/nvidia-mps/pipe/slices/00_06.0-1", "/run/yunion-mps", true}},
		[]string{"GPU-76aef7ff"},
	}
	if err != nil || !reflect.DeepEqual(config, want) {
		t.Errorf("%v: got %+v, want %+v", err, config, want)
	}
}

func TestFreeSlice(t *testing.T) {
	slices := make([]Slice, 4)
	for i, name := range []string{"00:06.0-0", "00:06.0-1", "00:06.0-2", "00:07.0-0"} {
		slices[i].Name, slices[i].BaseAddr, slices[i].Healthy = name, name[:7], i != 1
	}
	slices = append(slices, Slice{Device: slices[2].Device, BoundTo: "train-1"})
	slices[4].Name, slices[4].BaseAddr = "00:08.0-0", "00:08.0"
	for _, try := range []struct {
		gpu   string
		taken string
		want  string
	}{
		{"00:06.0", "", "00:06.0-0"},
		{"00:06.0", "00:06.0-0", "00:06.0-2"},
		{"00:07.0", "00:06.0-0", "00:07.0-0"},
		{"00:07.0", "00:07.0-0", ""},
		{"00:08.0", "", ""},
	} {
		got, found := FreeSlice(slices, try.gpu, map[string]bool{try.taken: true})
		if got.Name != try.want || found != (try.want != "") {
			t.Errorf("%v: got %q", try, got.Name)
		}
	}
}

func TestCandidates(t *testing.T) {
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "")
	client := &Client{}
	if got := client.candidates(); !reflect.DeepEqual(got, addresses) {
		t.Errorf("got %v", got)
	}
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/a")
	if got := client.candidates(); !reflect.DeepEqual(got, []string{"unix:path=/a"}) {
		t.Errorf("got %v", got)
	}
	client.Address = "unix:path=/b"
	if got := client.candidates(); !reflect.DeepEqual(got, []string{"unix:path=/b"}) {
		t.Errorf("got %v", got)
	}
}

// Somebody who listens at the address and says nothing holds nobody up for long.
func TestASilentBus(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "bus")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := connect("unix:path=" + socket)
	if conn != nil || err == nil || !strings.Contains(err.Error(), "no answer within 5s") {
		t.Errorf("got %v", err)
	}
}

// Every user may send signals to this program directly.
func TestOnlyTheServiceTellsOfChanges(t *testing.T) {
	s := &sender{owner: ":1.7"}
	changed := func(sender string) *dbus.Signal {
		return &dbus.Signal{Sender: sender, Name: service + ".Manager.DevicesChanged"}
	}
	owned := func(sender, name, owner string) *dbus.Signal {
		body := []interface{}{name, ":1.7", owner}
		return &dbus.Signal{Sender: sender, Name: "org.freedesktop.DBus.NameOwnerChanged", Body: body}
	}
	for _, step := range []struct {
		what     string
		signal   *dbus.Signal
		accepted bool
	}{
		{"the service", changed(":1.7"), true},
		{"somebody else", changed(":1.8"), false},
		{"somebody who speaks for the bus", owned(":1.8", service, ":1.8"), false},
		{"another name", owned("org.freedesktop.DBus", "org.example", ":1.8"), false},
		{"the service ends", owned("org.freedesktop.DBus", service, ""), true},
		{"nobody", changed(""), false},
		{"the service starts again", owned("org.freedesktop.DBus", service, ":1.9"), true},
		{"the former service", changed(":1.7"), false},
		{"the new service", changed(":1.9"), true},
		{"another signal", &dbus.Signal{Sender: ":1.9", Name: "org.example.Other"}, false},
	} {
		if s.accepts(step.signal) != step.accepted {
			t.Errorf("%s: accepted is not %v", step.what, step.accepted)
		}
	}
}
