module yunion.io/mps

go 1.18

require github.com/godbus/dbus/v5 v5.1.0
