/* machine.h - the CPUs of this machine that no program uses. The function kvant_available_cpus()
 * counts the CPUs that this process may use, whether or not other programs keep them busy. */
#pragma once

/* The number of idle CPUs among the CPUs that this process may use. It has a fraction for a CPU
 * that is busy for a part of the time. Watches them for a tenth of a second. Programs with a nice
 * value count, too: eight of nice value 5 left two threads that wait for each other 0.9 tokens/s.
 * HUGE_VAL when the system does not say. */
double machine_idle_cpus(void);
