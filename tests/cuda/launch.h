// What driver.cpp has of emulated.cpp.
#pragma once
#include "emulated.h"

namespace emulated {

// Runs a kernel, with so many bytes of shared memory of the launch's choice, to its end; 0, or an error of the driver's with why it came to that.
int run(const Registered& kernel, const Index& groups, unsigned shared, const Call& call, const char** why);

}  // namespace emulated
