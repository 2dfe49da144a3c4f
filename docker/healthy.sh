#!/bin/sh
# Whether FLARE's server or client, which `medfl site serve` starts, is running in this container.
exec grep -qs '[n]vflare\.private\.fed\.app\.\(client\|server\)' /proc/[0-9]*/cmdline
