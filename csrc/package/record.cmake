# _build_record.py: plain values, read by deepspeed/ops/native/record.py.

# `value` as a Python string.
function(ds_quoted value result)
  string(REPLACE "\\" "\\\\" value "${value}")
  string(REPLACE "\"" "\\\"" value "${value}")
  string(REPLACE "\n" "\\n" value "${value}")
  string(REGEX REPLACE "[\t\r]" " " value "${value}")
  set(${result} "\"${value}\"" PARENT_SCOPE)
endfunction()

# A list of strings as a Python tuple.
function(ds_tuple values result)
  set(text "(")
  foreach(value IN LISTS values)
    ds_quoted("${value}" quoted)
    string(APPEND text "${quoted}, ")
  endforeach()
  set(${result} "${text})" PARENT_SCOPE)
endfunction()

function(ds_record file absence operators sources notes)
  ds_quoted("${absence}" absence)
  ds_tuple("${operators}" operators)
  ds_tuple("${sources}" sources)
  ds_tuple("${notes}" notes)
  file(WRITE "${file}" "# Written when the package was built (csrc/package).\n"
       "ABSENCE = ${absence}\nOPERATORS = ${operators}\nSOURCES = ${sources}\nNOTES = ${notes}\n")
endfunction()
