/* available.h - what kvant_available_cpus() is made of. */
#pragma once

#include <stdint.h>

/* The CPUs that the process's control groups pay for, rounded up, at least 1; UINT32_MAX without a
 * limit. root stands before every path that is read: "" for this machine. */
uint32_t kvant_quota_cpus(const char *root);
