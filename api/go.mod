module github.com/kinference/kinference/api

go 1.26.0
