/* accel.h - the KVANT_ACCEL device: attention over llama.cpp's own KV cache.
 *
 * The device has the type ACCEL, which llama.cpp adds to every context of a process. It takes
 * FLASH_ATTN_EXT nodes alone. The cache stays in host memory, in llama.cpp's own bytes; all other
 * nodes stay with the CPU back end. */
#ifndef KVP_ACCEL_H
#define KVP_ACCEL_H

#include <stdbool.h>

#include "abi.h"

/* Prepares the device and returns it; the same pointer for the life of the process. */
abi_device *kvp_accel_setup(abi_reg *reg);

#endif /* KVP_ACCEL_H */
