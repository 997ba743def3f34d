/* available.h - the part of kvant_available_cpus() that reads control groups. */
#pragma once

#include <stdint.h>

/* How many CPUs the process's control groups allow, rounded up, at least 1; UINT32_MAX without a
 * limit. root is put before every path that is read; "" for this machine. */
uint32_t kvant_quota_cpus(const char *root);
