package mps

import (
	"encoding/json"

	"github.com/godbus/dbus/v5"
)

// Device has the values that a slice and a GPU both have. The JSON names are those of the platform, of D-Bus and of
// `yunion-mpsctl list --json`. A value that is not known is nil, empty or, for memory, 0.
type Device struct {
	// The platform's address, and the name that ContainerConfig takes: 00:06.0-1 of a slice, 00:06.0 of a GPU.
	Addr string `json:"addr"`
	Name string `json:"name"`
	// The address of the GPU, without the domain if that is 0000; the full address.
	BaseAddr string `json:"base_addr"`
	PCIBDF   string `json:"pci_bdf"`
	// NVIDIA_MPS of a slice, GPU of a GPU.
	DevType        string    `json:"dev_type"`
	VendorDeviceID string    `json:"vendor_device_id"`
	Model          string    `json:"model,omitempty"`
	DevicePath     string    `json:"device_path,omitempty"` // The UUID of the GPU.
	NumaNode       int       `json:"numa_node"`             // -1: none.
	PCIEInfo       *PCIEInfo `json:"pcie_info,omitempty"`

	// In MiB, of one slice; the first is of the GPU.
	MPSMemoryTotal      int `json:"mps_memory_total,omitempty"`
	MPSMemoryLimit      int `json:"mps_memory_limit,omitempty"`
	MemorySize          int `json:"memory_size,omitempty"`
	MPSThreadPercentage int `json:"mps_thread_percentage"`

	DetectedOnHost bool `json:"detected_on_host"`
	HotPluggable   bool `json:"hot_pluggable"`

	// Servable: register it. Healthy: place new work on it. Keep a registered device as long as it is listed, since
	// work may go on there.
	Servable bool   `json:"servable"`
	Healthy  bool   `json:"healthy"`
	Reason   string `json:"reason"` // Why not, or a remark, for people.

	// What nvidia-smi says: the platform's metrics are by this index.
	NvidiaIndex *uint32 `json:"nvidia_index,omitempty"`
	NvidiaMinor *uint32 `json:"nvidia_minor,omitempty"`
	NvidiaName  string  `json:"nvidia_name,omitempty"`
	ComputeMode string  `json:"compute_mode,omitempty"`

	RenderNode    string `json:"render_node,omitempty"`
	PipeDirectory string `json:"pipe_directory"`
	// Whether the GPU enforces the memory and the threads of a slice: from Volta on.
	LimitsEnforced bool `json:"limits_enforced"`
	// The place that a fault stays in: gpu, or slice.
	Isolation string `json:"isolation"`
}

// PCIEInfo is what the PCI Express link can do.
type PCIEInfo struct {
	TransferRatePerLane string `json:"transfer_rate_per_lane"`
	LaneWidth           int    `json:"lane_width,omitempty"`
	Throughput          string `json:"throughput"`
	Version             string `json:"version"`
}

// Slice is a virtual device, one of the N shares of a GPU.
type Slice struct {
	Device
	Ordinal     uint32 `json:"ordinal"`
	Index       int    `json:"index"`        // -1, the platform's default.
	DeviceMinor int    `json:"device_minor"` // -1, the platform's default.
	// An administrator has taken it out of use for new work; it is not healthy then.
	Drained bool `json:"drained"`
	// The label or the path of the control group that has it; empty where it is nobody's: Bind.
	BoundTo string `json:"bound_to"`
	// The paths of these control groups, as /proc/PID/cgroup has them; at most 8.
	BoundGroups []string `json:"bound_groups"`
	// Its clients are served: as Healthy, but true as well while it is drained.
	Served bool `json:"served"`
	// As of the last look. Changes of the numbers are no changes for Watch.
	Clients    *uint32 `json:"clients,omitempty"`
	MaxClients *uint32 `json:"max_clients,omitempty"`
	MemoryUsed *int    `json:"memory_used,omitempty"`
	Overuse    *string `json:"overuse,omitempty"`
	// Who keeps its clients together to its memory: "kernel" or "watch".
	MemoryEnforcedBy *string `json:"memory_enforced_by,omitempty"`
	// Why the kernel does not, though it was asked to.
	KernelLimitRefused *string `json:"kernel_limit_refused,omitempty"`
}

// GPU is a GPU with all of its slices.
type GPU struct {
	Device
	SharingMode string `json:"sharing_mode"` // MPS.
	VirtualNum  int    `json:"virtual_num"`  // How many slices it has.
	EqualSlices bool   `json:"equal_slices"` // Whether they have the same size.
	// Of the control daemon that serves it.
	ControlDaemon             string `json:"control_daemon"`
	ConfirmedMemoryLimit      int    `json:"confirmed_memory_limit,omitempty"`
	ConfirmedThreadPercentage int    `json:"confirmed_thread_percentage,omitempty"`
	// All its MPS clients, also those without a known slice, as of the last look. Changes of them are no changes for Watch.
	Clients    *uint32 `json:"clients,omitempty"`
	MemoryUsed *int    `json:"memory_used,omitempty"`
	// The most clients at once; nil where each slice has so many places of its own.
	MaxClients *uint32 `json:"max_clients,omitempty"`
}

// ContainerConfig is what a container needs besides the driver's files, which the NVIDIA runtime adds.
type ContainerConfig struct {
	Environment []Variable `json:"environment"`
	Mounts      []Mount    `json:"mounts"`
	GPUs        []string   `json:"gpus"` // UUIDs, each once.
}

// Variable is one of the environment. YUNION_MPS_DEVICE is the names of the slices, YUNION_MPS_CPUS the list of the CPUs
// near the GPUs, YUNION_MPS_MEMORY_FRACTION and YUNION_MPS_MEMORY_MIB the memory that one process can use.
type Variable struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Mount is a directory of the host. D-Bus knows the fields by their order.
type Mount struct {
	HostPath      string `json:"host"`
	ContainerPath string `json:"container"`
	ReadOnly      bool   `json:"read_only"`
}

// FreeSlice returns a healthy slice of a GPU that nobody has: it is not bound, and not in taken, the names of the slices that
// your containers have. An agent that binds its containers needs no taken.
// It is for an agent that has one row for each GPU: the name of a GPU means the same slice to every container.
func FreeSlice(slices []Slice, gpu string, taken map[string]bool) (Slice, bool) {
	for _, slice := range slices {
		if slice.BaseAddr == gpu && slice.Healthy && slice.BoundTo == "" && !taken[slice.Name] {
			return slice, true
		}
	}
	return Slice{}, false
}

// decode stores dictionaries in a list of structs by their JSON names. Unknown keys are for later versions; a value of
// another type is an error. godbus itself stores no dictionary in a struct.
func decode(dictionaries []map[string]dbus.Variant, rows interface{}) error {
	plain := make([]map[string]interface{}, len(dictionaries))
	for i, dictionary := range dictionaries {
		if err := dbus.Store([]interface{}{dictionary}, &plain[i]); err != nil {
			return err
		}
	}
	text, err := json.Marshal(plain)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, rows)
}
