/* cpu.h - the instruction set level of this machine and the level in use. */
#pragma once

#include <stdbool.h>

#include <kvant/kvant.h>

/* Whether this machine has a level's features and the operating system lets programs use them. */
bool kvant_cpu_has(kvant_cpu_level level);
