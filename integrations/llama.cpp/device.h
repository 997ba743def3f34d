/* device.h - the KVANT device: its properties for llama.cpp, and the nodes that it takes. */
#ifndef KVP_DEVICE_H
#define KVP_DEVICE_H

#include "abi.h"

/* Prepares the device for back-end API 2 or 3 and returns it; the same pointer for the life of the
 * process. */
abi_device *kvp_device_setup(int api, abi_reg *reg);

#endif /* KVP_DEVICE_H */
