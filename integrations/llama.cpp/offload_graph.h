/* offload_graph.h - back ends of offload.h. Each is the device's own, with a few functions
 * replaced. */
#pragma once

#include "abi.h"

/* Creates a back end by the device's own function `init`. NULL on failure. */
abi_backend *kvp_offload_backend(abi_device *device,
                                 abi_backend *(*init)(abi_device *device, const char *params),
                                 const char *params);

void kvp_offload_set_n_threads(abi_backend *backend, int n_threads);
