# The build itself, run by the target of CMakeLists.txt: compile, then write down what came of it.
include("${SETTINGS}")
include("${CMAKE_CURRENT_LIST_DIR}/build.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/record.cmake")

if(NOT absence)
  ds_build(absence)
  if(absence AND DS_IS_REQUIRED)
    message(FATAL_ERROR "${DS_IS_REQUIRED} asks for the native library of deepspeed, but ${absence}\n"
                        "Correct that, or leave ${DS_IS_REQUIRED} out to use the slower torch twins.")
  elseif(absence)
    message(WARNING "The native library of deepspeed is left out, and its torch twins serve: ${absence}")
  endif()
endif()
if(absence)
  set(DS_WANTED "")
endif()
ds_record("${CMAKE_CURRENT_BINARY_DIR}/_build_record.py" "${absence}" "${DS_WANTED}" "${sources}" "${DS_NOTES}")
