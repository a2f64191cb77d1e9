module github.com/kinference/kinference/services/router

go 1.26.0

require (
	github.com/kinference/kinference/api v0.0.0
	github.com/kinference/kinference/internal v0.0.0
	github.com/kinference/kinference/proto v0.0.0
)

replace github.com/kinference/kinference/proto => ../../proto

replace github.com/kinference/kinference/internal => ../../internal

replace github.com/kinference/kinference/api => ../../api
