/* device.h - the KVANT device and its back end instances: what llama.cpp is told about them, which nodes
 * they take, and the loop that computes a graph. */
#ifndef KVP_DEVICE_H
#define KVP_DEVICE_H

#include "abi.h"

/* Prepares the device for back-end API 2 or 3 and returns it; the same pointer for the life of the process. */
abi_device *kvp_device_setup(int api, abi_reg *reg);

/* For ggml_backend_set_n_threads, which llama.cpp looks up by name. */
void kvp_backend_set_n_threads(abi_backend *backend, int n_threads);

#endif /* KVP_DEVICE_H */
