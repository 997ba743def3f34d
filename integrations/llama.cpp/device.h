/* device.h - the plug-in's two devices, and the back end instances that llama.cpp makes of them.
 * KVANT type GPU, because llama.cpp gives its KV cache to GPU devices (-ngl 99). It takes the few
 * operations that touch the cache and none that multiplies weights, so weights stay on the CPU.
 * KVANT_ACCEL type ACCEL, which llama.cpp adds to every context of a process. It takes
 * FLASH_ATTN_EXT nodes alone. The cache stays in host memory, in llama.cpp's own bytes; all other
 * nodes stay with the CPU back end.
 */
#ifndef KVP_DEVICE_H
#define KVP_DEVICE_H

#include "abi.h"

/* Prepares a device (KVANT: for back-end API 2 or 3) and returns it; the same pointer for the life
 * of the process. */
abi_device *kvp_device_setup(int api, abi_reg *reg);
abi_device *kvp_accel_setup(abi_reg *reg);

/* For ggml_backend_set_n_threads, which llama.cpp looks up by name. */
void kvp_backend_set_n_threads(abi_backend *backend, int n_threads);

#endif /* KVP_DEVICE_H */
